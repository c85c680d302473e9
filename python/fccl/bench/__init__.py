"""``fccl bench``: measures collectives and compares backends.

One module per idea: `cases` (the operations), `pattern` (predictable data), `buffers` (the working set),
`board` (aligning the ranks), `yardstick` (memcpy), `worker` (a rank), `runner` (the ranks together),
`report` (table and JSON), `command` (the command line).
"""
