"""`python -m jaxllm.profiling FOLDER`: reads a session that was recorded, and prints its tables."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from jaxllm.profiling.report import write_report


def main() -> None:
    parser = argparse.ArgumentParser("python -m jaxllm.profiling", description="Reads a session that was recorded.")
    parser.add_argument("folder", type=Path, help="of the session: .../plugins/profile/DATE")
    parser.add_argument("--json", action="store_true", help="print the numbers instead of tables")
    arguments = parser.parse_args()
    try:
        profile = write_report(arguments.folder)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(profile.summary.to_dict()) if arguments.json else profile)


if __name__ == "__main__":
    main()
