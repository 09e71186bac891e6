"""Scripts that run other engines with the same workload. Each one needs its engine installed; nothing imports them.

    python -m benchmarks.peers.vllm_offline --shape 0.6b --single
    python -m benchmarks.peers.sglang_offline --shape 8b --logprobs
    python -m benchmarks.peers.transformers_offline --shape tiny --device cpu

Run them from the root of this repository with the other engine's own Python. They print the same lines as
`benchmarks.offline`.
"""
