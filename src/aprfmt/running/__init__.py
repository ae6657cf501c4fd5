"""What is done with a model by running it in llama.cpp."""
