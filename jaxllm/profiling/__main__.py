"""`python -m jaxllm.profiling FOLDER`: reads a session that was recorded, and prints its summary as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxllm.profiling.report import write_report


def main(folder: str) -> None:
    try:
        summary = write_report(Path(folder)).summary
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(summary.to_dict()))


if __name__ == "__main__":
    main(sys.argv[1])
