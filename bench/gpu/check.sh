#!/bin/bash
# Checks and measures fccl's CUDA half on a machine with one GPU; see docs/cuda.md, or --help.
#
#   bench/gpu/check.sh [--only STAGE]… [--out DIR]
#
# PYTHON names the interpreter whose torch is used (python3).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/check.py" "$@"
