"""Register nodes' public keys with the SuperLink, and write which node is which client: nodes.json.

``python register.py NODES.JSON node-0.pub node-1.pub …``, with the keys in the order of the clients. Nothing is done if
NODES.JSON exists.
"""

import json
import subprocess
import sys
from pathlib import Path

table, *keys = map(Path, sys.argv[1:])
if not table.exists():
    nodes = {}
    for client, key in enumerate(keys):
        command = ["flwr", "supernode", "register", str(key), "federation", "--format", "json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        answer, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{") :])
        if not answer["success"]:
            sys.exit(f"cannot register {key}: {answer['error-message']}")
        nodes[answer["node-id"]] = client
    table.write_text(json.dumps(nodes))
