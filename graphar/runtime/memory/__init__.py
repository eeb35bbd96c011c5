"""What a communicator holds on GPUs: addresses, memory that peers map, symmetric tensors, and its suspension."""
