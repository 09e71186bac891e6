"""Fused operators for the CPU in C++, compiled by the machine's own compiler when they are first needed.

`library` compiles and loads them, `kernels` wraps them as functions of tensors. All operators compute in float32.
"""
