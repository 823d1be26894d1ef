"""The core that runs jobs, under virtual time: agents, workers, networks and clocks are models, and no second is waited for.

======================  ====================================================================================
`engine`                the heap of what is to happen, by (time, priority, order)
`costs`                 what everything takes, in seconds of virtual time
`coordinator`           the shell: stamps, timers, connections, leases
`agents`, `workers`     obey the core's commands, and answer with the events that real ones send
`eras`                  what the workers of one generation do together: building groups, gates
`memory`                snapshots, copies and parity: what a state is restored from
`truth`                 what has really happened, and what must hold of it at every step
`injectors`             faults of `rackrun.chaos.faults.fault_types`, in a model
`simulation`            one job of one seed, from its start to its end
`swarm`, `fuzz`         jobs and faults drawn from a seed; many seeds; a reduced plan of one that fails
======================  ====================================================================================

Nothing here reads a clock, and whatever is random is drawn from streams of the seed: a seed is a run. `Simulation.trace` is a hash of all
that the core was told and has said.
"""
