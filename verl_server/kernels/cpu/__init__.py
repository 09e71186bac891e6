"""Fused operators for the CPU in C++: compiled by the machine's own compiler the first time they are needed.

`library` compiles and loads them, `ops` and `models.cpu_attention` call them. All is float32.
"""
