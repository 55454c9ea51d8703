"""A Flower app that fine-tunes a language model by LoRA, and can be audited."""
