"""llama.cpp in a process of its own, which may die, hang or refuse a file while this one goes on.

`client` starts `worker`, which answers one JSON line for each request with one of the engines of `engine.ENGINES`.
"""
