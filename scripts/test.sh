#!/usr/bin/env bash
# Runs the linter and the tests.
# Usage: scripts/test.sh [OPTION OF pytest]...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh demo,eval,test
.venv/bin/python -m ruff check .
.venv/bin/python scripts/get_demo_model.py
.venv/bin/python -m pytest tests "$@"
