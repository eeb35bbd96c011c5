"""Which algorithm and grid a call takes: facts in, a decision out. Nothing here touches a GPU."""
