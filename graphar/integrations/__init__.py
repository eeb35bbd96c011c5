"""graphar inside other programs: the plugins of vLLM and SGLang."""
