"""Text and token ids: the model's tokenizer, and text as tokens arrive."""
