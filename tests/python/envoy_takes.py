"""Has Envoy check a configuration: exit 0 if it takes it.

usage: envoy_takes.py FILE
"""

import subprocess
import sys

from through_envoy import program

sys.exit(subprocess.run([program(), "--mode", "validate", "-c", sys.argv[1]]).returncode)
