"""LoRA adapters, merged into a model's weights as it is loaded."""
