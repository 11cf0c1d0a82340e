#!/usr/bin/env bash
# Runs on the machine with the GPU, in the root of the checkout, without a network: installs the wheels of pack.py and the package
# beside the machine's own Python, and then runs the checks. Arguments go to pytest: files, -k, ... With --install it only installs the wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
site=${AGENTRL_GPU_SITE:-/tmp/agentrl-gpu}
wheels=${AGENTRL_GPU_WHEELS:-.gpu_wheels}
shopt -s nullglob
carried=("$wheels"/*/*.whl)
if [ ${#carried[@]} -eq 0 ] && [ ! -d "$site" ]; then
    echo "no wheels in $wheels/part*; make them by benchmarks/gpu/pack.py where there is a network" >&2
    exit 2
fi

install=("$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --upgrade --target "$site")
if [ ${#carried[@]} -gt 0 ]; then "${install[@]}" "${carried[@]}"; fi
if [ "${1:-}" = --install ]; then exit; fi
# The package is built from a copy: the checkout may be read-only, and stays as it is.
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
cp -r pyproject.toml README.md LICENSE agentrl agents tools interactions configs docs "$source"
PYTHONPATH=$site "${install[@]}" --no-build-isolation "$source" >/dev/null

# What is installed comes before what the machine has, and the folder that commands run in is no package.
export PYTHONPATH=$site PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ $# -eq 0 ]; then set -- tests/gpu; fi
"$python" -m pytest -m gpu -p no:cacheprovider -p no:agentrl --show-capture=no "$@"
