"""
Stands before the image's entrypoint on simulated servers: `entrypoint.py [ARGUMENT ...]`.

The first server that starts is a machine with a broken card: its `nvidia-smi` says so. All others
are as they should be. Which one is first stands in the store, the only place that servers share.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from runner import guardian

FIRST = "first-server"
REPORT = """<nvidia_smi_log><driver_version>550.54.15</driver_version><cuda_version>12.4</cuda_version>
<gpu id="00000000:01:00.0"><product_name>NVIDIA GeForce RTX 4090</product_name><uuid>GPU-0a</uuid>
<minor_number>0</minor_number><fb_memory_usage><total>24564 MiB</total><used>4 MiB</used></fb_memory_usage>
<compute_mode>Default</compute_mode><remapped_rows><remapped_row_pending>No</remapped_row_pending>
<remapped_row_failure>Yes</remapped_row_failure></remapped_rows></gpu></nvidia_smi_log>"""
DRIVER = f"""#!/bin/sh
case "$*" in
  *-x*) cat <<'.'
{REPORT}
.
;;
  *query-gpu=index,uuid*) echo '0, GPU-0a, NVIDIA GeForce RTX 4090, 24564, 550.54.15' ;;
  *) exit 2 ;;
esac
"""


def main(arguments: list[str]) -> None:
    job = json.loads(base64.b64decode(os.environ["RUNNER_JOB"]))
    is_first = _first(job["offload"]["to"], os.environ["VRAMFARM_SERVER_ID"]) == os.environ["VRAMFARM_SERVER_ID"]
    if Path("/entrypoint.sh").exists():  # in the image, where PATH is what the engine was told
        if is_first:
            _install(Path("/usr/local/bin"))
        os.execv("/entrypoint.sh", ["/entrypoint.sh", *arguments])
    if is_first:
        _install(Path(os.environ["VRAMFARM_WORKSPACE"], "driver"))
        os.environ["PATH"] = f"{os.environ['VRAMFARM_WORKSPACE']}/driver:{os.environ['PATH']}"
    command = ("-m", "runner", "run") if arguments else (str(Path(guardian.__file__)),)  # as entrypoint.sh does
    os.execv(sys.executable, [sys.executable, "-I", *command, *arguments])


def _install(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(DRIVER)
    (folder / "nvidia-smi").chmod(0o755)


def _first(store: str, server: str) -> str:
    """The server that was here first; this one, if none was."""
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    client = boto3.client("s3", region_name="us-east-1", config=Config(s3={"addressing_style": "path"}))
    key = f"{prefix}/{FIRST}"
    try:
        return client.get_object(Bucket=bucket, Key=key)["Body"].read().decode()
    except ClientError:
        client.put_object(Bucket=bucket, Key=key, Body=server.encode())
        return server


if __name__ == "__main__":
    main(sys.argv[1:])
