"""Names for files while they are written; a whole one is moved to its own name. A process that is killed leaves them behind."""

import re
import secrets


def beside(path):
    return f"{path}.{secrets.token_hex(4)}.tmp"


def left_over(names, files):
    """Those of `names` that were made for a file that the pattern `files` describes. Any other *.tmp is somebody's own."""
    return [name for name in names if re.fullmatch(rf"(?:{files})\.[0-9a-f]{{8}}\.tmp", name)]
