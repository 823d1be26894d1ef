"""What caused a failure: the script, a GPU, the network, or nothing that can be determined."""
