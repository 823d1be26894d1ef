"""The core runs whole jobs in virtual time, with models of agents, workers, networks and clocks, and without any
waiting.

==============================  ============================================================================
`base.virtual_time`             the heap of what is to happen, by (time, priority, order)
`base.durations`                what everything takes, in seconds of virtual time
`base.ground_truth`             what has really happened, and what must hold of it at every step
`base.virtual_loop`             the event loop of a process that may be stopped
`base.coordinator_checks`       what must hold of the core's answers, and of what the driver does with them
`cluster.coordinator_model`     the real driver, over models of connections, leases, the policy and the provider
`cluster.agent_model`           the agent's own machines (`rackrun.agent.tray`), over models of processes,
                                clocks and connections
`cluster.worker_model`          carries out the core's commands, and answers with the events that real ones send
`cluster.generations`           what the workers of one generation do together: building groups, gates
`cluster.restore_sources`       snapshots, copies and parity, from which state is restored
`cluster.fault_models`          faults of `rackrun.chaos.faults`, in a model
`cluster.simulation`            one job of one seed, from its start to its end
`fuzzing.draw_job`,             jobs and faults drawn from a seed; many seeds, and a reduced plan of one
`fuzzing.fuzz`                  that fails
==============================  ============================================================================

No module reads a clock, and everything random is drawn from streams of the seed, so a seed determines a run.
`Simulation.trace` is a hash of everything that the core was given and has returned.
"""
