"""From a kernel's source to its launch, and the memory that ranks share."""
