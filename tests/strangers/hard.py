"""Faults where scripts are hardest to bring back: chosen by hand, each for a reason. ``make strangers ARGS=--hard`` runs them.

A line is found by what stands in it, so that scripts may change.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.strangers.job import SCRIPTS, Fault
from tests.strangers.places import find_places


@dataclass(frozen=True)
class Hard:
    script: str
    text: str
    """The line with this in it, the first of them."""
    unit: int
    why: str
    rank: int = 1
    visit: int = 1
    what: str = "kill"
    spares: int = 1

    def fault(self) -> Fault:
        path = SCRIPTS / f"{self.script}.py"
        lines = path.read_text().splitlines()
        line = next((number for number, words in enumerate(lines, 1) if self.text in words), 0)
        if not line:
            raise ValueError(f"{path}: no line with {self.text!r}")
        place = find_places(path).of.get(line, "helper")
        return Fault(0, self.what, self.rank, self.unit, line, self.visit, place)


HARD = (
    Hard("moco", "positive = ", 8, "frozen parameters moved by .data before the gate", visit=2),
    Hard("moco", "positive = ", 8, "frozen parameters moved by .data before the gate, by rank 0", rank=0),
    Hard("vq_codebook", "step.backward", 8, "a buffer of 2 MiB moved by .data before the gate", visit=2),
    Hard("memory_bank", "step.backward", 8, "an object's tensors written before the gate", visit=2),
    Hard("state_copies", "step.backward", 8, "state_dict returns copies; changed before the gate", visit=2),
    Hard("replay_buffer", "step.backward", 8, "an environment and a buffer played before the gate"),
    Hard("warmup_before", "step.backward", 8, "a schedule that is stepped before the gate", visit=2),
    Hard("randomness", "step.backward", 8, "random numbers between steps, on who takes over", visit=2),
    Hard("gan", "opt_g.zero_grad", 8, "after the first of two optimizers, rank 1"),
    Hard("gan", "step.backward(loss_g)", 8, "in the second backward, others too"),
    Hard("gan", "opt_g.step()", 8, "before the second update, rank 0", rank=0),
    Hard(
        "gan_accumulated",
        "p.requires_grad_(True)",
        8,
        "after the first of two optimizers, while others have frozen the first model",
    ),
    Hard("wgan", "for p in critic.parameters()", 8, "after the first of two optimizers, before the clamp"),
    Hard(
        "clamped_late",
        "optimizer.step()",
        8,
        "weights clamped by .data for the first time, after three steps of reading",
    ),
    Hard("clamped_late", "optimizer.step()", 11, "weights clamped by .data, some of them for the first time", rank=0),
    Hard("two_optimizers", "schedule.step()", 8, "between two optimizers of one model, dense"),
    Hard("sparse_dense", "dense.step()", 8, "between two optimizers of one model, sparse"),
    Hard("metrics_after", "dist.all_reduce(metrics)", 8, "a reduction after the update, then schedule and average"),
    Hard("metrics_after", "ema.update_parameters", 8, "after a reduction and a schedule, before the average"),
    Hard("amp_fp16", "average.update(model)", 0, "a skipped update, and an average behind it"),
    Hard("skip_guard", "scheduler.step()", 2, "a guard that skips, an average and a schedule behind it", rank=0),
    Hard("syncbn_by_hand", "return (x - mean)", 8, "buffers moved after a reduction in the forward"),
    Hard("batchnorm", "dist.all_reduce(correct)", 9, "a phase in eval mode"),
    Hard("ema_by_hand", "dist.all_reduce(loss)", 11, "a phase with other weights in the model"),
    Hard(
        "ema_by_hand", "ema.restore(model", 23, "a later phase with other weights in the model, which no version shows"
    ),
    Hard("swa", "accuracy = ", 23, "the last phase, which changes buffers"),
    Hard("slow_save", "time.sleep(1.5)", 9, "a slow save of rank 0, and rank 1 is lost meanwhile", rank=0),
    Hard("early_stopping", "stopping.update", 11, "a phase that decides when to stop"),
    Hard("loggers", "writer = writer or", 8, "rank 0 and its log", rank=0),
    Hard("loader_workers", "step.backward", 8, "loader workers of who is lost", visit=2),
    Hard("byol", "t.data.mul_", 8, "in the middle of an average", visit=3),
    Hard("tp_dp", "step.backward", 8, "one half of a tensor-parallel pair"),
    Hard("hsdp", "step.backward", 8, "a shard that has a replica"),
    Hard("fsdp_mixed", "scheduler.step()", 8, "a shard that has none"),
    Hard("fsdp_exact", "ema.update(model)", 8, "shards without replica, and without a spare", spares=0),
    Hard("fsdp_exact", "ema.update(model)", 8, "shards without replica, and an average of them made by hand"),
    Hard("tp_dp", "step.backward", 0, "one half of a tensor-parallel pair, in the first step", rank=3),
    Hard("schedule_free", "rows = slice", 3, "the first phase, with other weights in the model"),
    Hard("schedule_free", "dist.all_reduce(loss)", 15, "a later phase, with other weights in the model", rank=0),
    Hard("schedule_free", "seen.append", 3, "the first phase, when the weights are back"),
    Hard("lion_data", "optimizer.step()", 0, "weights decayed through .data before the gate, in the first step"),
    Hard("lion_data", "optimizer.step()", 1, "weights decayed through .data before the gate, in the second step"),
    Hard("lion_data", "theirs.data, alpha=0.1", 8, "in an average of weights through .data", visit=2),
    Hard("moe_bias", "moe.load.zero_()", 8, "between two changes of buffers after the update"),
    Hard("muon_fsdp", "p.add_(distribute", 8, "in an optimizer's own collectives", visit=2),
    Hard("ppo", "optimizer.zero_grad", 8, "after the second of three updates", visit=2),
    Hard("saves_by_hand", "best.loss, best.weights", 2, "the first phase that keeps the best weights"),
    Hard("saves_by_hand", "os.replace", 9, "rank 0 between writing a file and naming it", rank=0),
    Hard("class_statistics", "self.count[label]", 1, "statistics of each rank, half moved", visit=3),
    Hard("lora", "step.backward", 8, "a world that shrinks", spares=0),
    Hard("pipeline", "h.backward(grad)", 8, "a stage", rank=0),
    Hard("compiled", "step.backward", 8, "a compiled model", rank=0),
    Hard("after_loop", "dist.barrier()", 1_000_000, "when all is done but the end"),
    Hard("plateau", "record.end", 1_000_000, "when all is done, stopped", what="stop"),
    Hard("curriculum", "run.log(loss=loss)", 8, "an endless loop between two steps", what="spin"),
    Hard("onecycle", "optimizer.zero_grad()", 8, "a sleep at the end of a step", what="sleep"),
    Hard("batchnorm", "step.backward", 1, "statistics of each rank, before ranks were compared", visit=2),
    Hard("averaged_model", "optimizer.step()", 1, "an average of statistics of each rank, in the second step"),
    Hard("moco_large", "step.backward", 1, "a queue of 6 MB of each rank, in the second step", visit=2),
    Hard("gan_frozen_wrapper", "F.softplus(-D(G(", 8, "behind the first update, the second model frozen", visit=2),
    Hard("gan_frozen_wrapper", "D.requires_grad_(True)", 8, "after both updates, one model frozen", rank=0),
    Hard("gan_frozen_wrapper", "F.softplus(-D(G(", 8, "a frozen model in a world that shrinks", spares=0),
    Hard("gan_frozen_each_batch", "opt_g.step()", 8, "a frozen model that broadcasts its buffers", rank=0),
    Hard("fsdp_gan", "F.softplus(-D(G(", 8, "a frozen model in shards", visit=2),
    Hard("display_forward", "after = model(shown)", 8, "a forward without a backward at the end of a step"),
    Hard("display_forward", "pred = model(shown)", 8, "a forward without a backward between steps"),
    Hard("display_forward", "step.backward", 9, "a forward without a backward before the first micro-batch", visit=2),
    Hard("display_forward", "step.backward", 10, "a forward without a backward before a backward", spares=0),
    Hard("display_forward_batchnorm", "model(shown).argmax(1).sum", 8, "a forward that changes statistics, at the end"),
    Hard("fsdp_display_forward", "after = model(shown)", 8, "a forward of shards without a backward, at the end"),
    Hard("read_ahead", "step.backward", 8, "one micro-batch ahead", visit=2),
    Hard("read_ahead", "step.backward", 9, "all micro-batches ahead, in a world that shrinks", spares=0),
    Hard(
        "read_ahead_weights", "step.backward", 8, "one micro-batch ahead, on the rank that repeats one", rank=0, visit=2
    ),
    Hard("read_ahead_weights", "step.backward", 9, "all micro-batches ahead, where numbers differ", spares=0),
    Hard("frozen_gradually", "step.backward", 4, "parameters that have left the groups in this step", visit=2),
    Hard(
        "frozen_gradually", "step.backward", 8, "parameters out of the groups for long, and more in this step", rank=0
    ),
    Hard("frozen_gradually", "step.backward", 14, "parameters that came back in this step", visit=2),
    Hard("frozen_gradually", "step.backward", 19, "more parameters that came back in this step", what="stop"),
    Hard("frozen_gradually", "return step.loss", 23, "parameters that leave the groups after the update"),
    Hard("frozen_state_deleted", "step.backward", 8, "Adam state deleted in this step", visit=2),
    Hard("fsdp_frozen_gradually", "step.backward", 3, "shards that have left the groups in this step"),
    Hard("fsdp_frozen_gradually", "step.backward", 12, "shards that came back in this step", visit=2),
    Hard("frozen_gradually", "step.backward", 15, "parameters out of the groups, in a world that shrinks", spares=0),
    Hard("fsdp_frozen_gradually", "step.backward", 5, "shards out of the groups, in a world that shrinks", spares=0),
    Hard("fsdp_frozen_gradually", "return step.loss", 13, "shards that came back, in a world that shrinks", spares=0),
    Hard("fsdp_gan", "F.softplus(-D(G(", 8, "two models in shards, in a world that shrinks", spares=0),
    Hard("curriculum_own_state", "dist.all_reduce(mean)", 8, "a curriculum that has drawn", rank=0),
    Hard("curriculum_own_state", "average.update(model", 8, "a curriculum that has moved on"),
    Hard("plain_ddp", "loss.backward()", -1, "a script that knows nothing", visit=20, spares=0),
    Hard("plain_ddp", "loss.backward()", -1, "a script that knows nothing, stopped", visit=20, what="stop", spares=0),
    Hard("checkpoint_resume", "loss.backward()", -1, "CheckpointManager under restarts", visit=20, spares=0),
)
