#!/usr/bin/env bash
# Answers a question with the demo model and a cache of 256 entries, far past 256 tokens.
# Usage: scripts/demo.sh [OPTION OF generate.py]...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh demo
.venv/bin/python scripts/get_demo_model.py
# The model is small: at lower temperatures it repeats itself, whatever its cache.
.venv/bin/python generate.py --budget 256 --max-new-tokens 1200 \
    --temperature 1.1 --min-p 0.06 --seed 1 \
    --prompt "Write a very long book chapter about the history of ships, from the first rafts to \
modern container ships. Go through the centuries one by one, and describe people, trade, wars and \
inventions in many paragraphs." "$@"
