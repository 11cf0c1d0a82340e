"""Models in GGUF files, the format of llama.cpp, written as Hugging Face folders."""
