"""Models as GGUF files, which llama.cpp, Ollama and LM Studio run.

`write.write_gguf` writes a file: `families` provides hyperparameters and tensors, `vocabulary` the tokenizer.
`verify` reads the file again and compares it with the model, and `modelfile` tells Ollama how to prompt it.
"""
