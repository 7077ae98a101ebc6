"""plotly's script, as it stands in the page."""

from __future__ import annotations

import base64
import gzip

__all__ = ["packed_script"]


def packed_script() -> str:
    """plotly.js, compressed: 2 MB of base64 in place of 4.8 MB of text. The page unpacks it itself.

    Raises:
        ImportError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            "the HTML report needs plotly, which is not installed; run: pip install 'musigma[report]'"
        ) from error
    # mtime=0: the same report gives the same bytes
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)).decode("ascii")
