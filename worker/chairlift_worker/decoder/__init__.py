"""A whole forward pass in native code, for models that are built as Llama is."""
