"""``fccl demo``: one training run with fccl, the same with Gloo, and what differs.

`command` is the command line, `worker` one training run, `model` what is trained and what is recorded,
`compare` the comparison.
"""
