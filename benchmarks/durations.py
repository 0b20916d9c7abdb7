"""How long presets take on this machine: runs them one after the other, and writes what `kvprobe ls`, `--dry-run` and
the bars of later runs say.

    python benchmarks/durations.py PRESET...

Beside other work seconds are too long, so they are not written if others used the machine.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kvprobe.durations import TIMING, Duration
from kvprobe.listing import digest_of_preset
from kvprobe.presets import presets
from kvprobe.shipped import shipped

QUIET = 0.1
"""The most that others may use, in cores."""


def main() -> None:
    page = shipped("analyses") / "durations.json"
    for name in sys.argv[1:]:
        with TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "kvprobe", "run", name, "--out", folder, "--name", "timed"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            record = json.loads((Path(folder) / "timed" / TIMING).read_text(encoding="utf-8"))
        took = replace(Duration.from_record(record), preset=name)
        print(f"{name}: {took}, {took.peak_bytes / 1e9:.1f} GB, others used {took.timing.others:.2f} cores")
        if took.timing.others > QUIET:
            sys.exit("Others had the machine too; wait until they end.")
        records = json.loads(page.read_text(encoding="utf-8")) | {digest_of_preset(presets()[name]): took.record()}
        # In the order of the presets; what has changed since it was measured goes.
        current = map(digest_of_preset, presets().values())
        records = {digest: records[digest] for digest in current if digest in records}
        page.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
