"""What an agent and its workers share: a message channel, a heartbeat page in shared memory, and what a worker is born with."""
