"""Page: a trace as one HTML file, which needs nothing else and no network.

`page.html` is the page, `page.js` draws; the trace stands between them in Chrome's format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def page(trace: dict[str, Any]) -> str:
    """Return the page that shows a trace."""
    text = (HERE / "page.html").read_text(encoding="utf-8")
    # Within a script element "</" would end it, and "<!--" begin something else.
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    drawing = (HERE / "page.js").read_text(encoding="utf-8")
    before, after = text.split("<!-- trace -->")
    return (
        f'{before}<script id="trace" type="application/json">{data}</script>\n'
        f"<script>\n{drawing}</script>{after}"
    )
