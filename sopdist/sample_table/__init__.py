"""Sample tables: columns with one row per sample, sharded across ranks by sample index.

Row i lives on rank i mod W. `table.py` holds the rows, `exchange.py` moves them between ranks, `shared.py` offers the
same calls for one rank and for many, and `reshard.py` splits saved tables for a different number of ranks. Does not
know about files or what the columns mean; `noise/` and `methods/` use it.
"""

from .agreement import check_same_on_all_ranks
from .exchange import Exchange, ExchangeStats
from .reshard import reshard
from .shared import SharedTable
from .table import SampleTable

__all__ = ["Exchange", "ExchangeStats", "SampleTable", "SharedTable", "check_same_on_all_ranks", "reshard"]
