"""What ranks have broadcast before run.steps() reaches spares that begin after the exchange was lost."""

from __future__ import annotations

import asyncio

import torch

from rackrun.link.exchange import ExchangeServer
from rackrun.protocol.boot import Boot
from rackrun.protocol.ids import Generation, Incarnation, Rank, SlotId
from rackrun.worker.communicators.setup_broadcasts import Broadcasts

TOKEN = "the-token-of-this-test"


def at(exchange: str, *, spare: bool) -> Broadcasts:
    boot = Boot(
        slot=SlotId("t/0"),
        incarnation=Incarnation(1),
        spare=spare,
        rank=Rank(0),
        local_rank=0,
        world_size=2,
        generation=Generation(1),
        env={},
        exchange=exchange,
        token=TOKEN,
    )
    return Broadcasts(boot)


def taken(spare: Broadcasts) -> float:
    tensor = torch.zeros(2)
    spare.receive(spare.next_key("world"), [tensor])
    return tensor.sum().item()


def given(root: Broadcasts) -> None:
    root.publish(root.next_key("world"), [torch.ones(2)])


async def test_who_has_given_or_taken_says_it_again_at_another_exchange() -> None:
    first, second, third = (ExchangeServer("127.0.0.1", TOKEN) for _ in range(3))
    one, two, three = await first.start(), await second.start(), await third.start()
    root, spare = at(one, spare=False), at(one, spare=True)
    await asyncio.to_thread(given, root)
    assert await asyncio.to_thread(taken, spare) == 2.0
    await first.close()

    await asyncio.to_thread(root.republish_at, two)
    late = at(two, spare=True)
    assert await asyncio.to_thread(taken, late) == 2.0
    await second.close()

    await asyncio.to_thread(spare.republish_at, three)  # the root is lost, too
    last = at(three, spare=True)
    assert await asyncio.to_thread(taken, last) == 2.0
    await third.close()
    for one_of_them in (root, spare, late, last):
        assert one_of_them._room is not None
        one_of_them._room.close()
