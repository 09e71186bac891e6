"""Other engines under the same work, for side-by-side runs. Each script needs its peer installed; nothing imports them.

    python -m benchmarks.peers.vllm_offline --shape 0.6b --single
    python -m benchmarks.peers.sglang_offline --shape 8b --logprobs
    python -m benchmarks.peers.transformers_offline --shape tiny --device cpu

Run them from this repository's root with the peer's own Python. They print the lines of `benchmarks.offline`.
"""
