"""A tensor-parallel decoder of Llama's shape: its steps by the ways to sum over ranks behind its linear layers."""
