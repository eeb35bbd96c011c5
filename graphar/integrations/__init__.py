"""graphar inside other programs: the process group backend of torch.distributed, and plugins of vLLM and SGLang."""
