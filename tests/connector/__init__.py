"""integrations/vllm: the connector without vLLM, by stubs of a few of its classes, and (slow) with it."""
