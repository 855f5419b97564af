#!/bin/sh
# Unpack pfl and BlazeFL, and what they import beside torch, numpy and scipy, into benchmarks/.carried, for a machine
# that cannot install anything: speed.py finds the folder there and runs both with its own Python.
#
#     sh benchmarks/peers/carry.sh [the other machine's Python version, 3.12 unless given]
#
# --platform any selects pure-Python wheels only. scipy, which is compiled, must be on the other machine already (it is
# wherever scikit-learn is). --no-deps leaves out dm-tree and wrapt, which are compiled and which pfl's federated
# averaging never imports. --ignore-requires-python: BlazeFL needs Python 3.12, which this machine may not have.
set -eu
folder="$(dirname "$0")/../.carried"
rm -rf "$folder"
"${PYTHON:-python3}" -m pip install --quiet --target "$folder" --no-deps --only-binary=:all: --ignore-requires-python \
    --platform any --implementation py --python-version "${1:-3.12}" \
    pfl==0.6.0 dp-accounting==0.5.1 prv-accountant==0.2.0 absl-py==1.4.0 attrs==23.2.0 dill==0.4.1 \
    multiprocess==0.70.19 packaging==25.0 blazefl==2.0.3 tqdm==4.67.1
du -sh "$folder"
