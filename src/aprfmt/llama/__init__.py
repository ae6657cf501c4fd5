"""llama.cpp in a separate process, which may crash, hang or refuse a file without affecting this one.

`client` starts `worker`, which answers each JSON line using one of the engines of `engine.ENGINES`.
"""
