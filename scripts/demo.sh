#!/usr/bin/env bash
# Answers a question with the demo model and a cache of 256 entries, far past 256 tokens.
# Usage: scripts/demo.sh [OPTION OF generate.py]...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh demo
.venv/bin/python scripts/get_demo_model.py
.venv/bin/python generate.py --budget 256 --max-new-tokens 1200 \
    --prompt "How does a bill become a law in the United States? Explain every step." "$@"
