"""Communication between an agent and its workers, and sockets and messages that other packages share."""
