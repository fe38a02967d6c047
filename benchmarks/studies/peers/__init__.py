"""Runahead beside vLLM, OpenVINO GenAI, llama.cpp and transformers on the same cores."""
