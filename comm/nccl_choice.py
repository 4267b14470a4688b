"""Whether GPU tensors of a group go by NCCL."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

import torch

from spmd.comm.errors import UserError
from spmd.comm.group import Group
from spmd.comm.nccl import NcclGroup
from spmd.comm.nccl_library import NcclLibrary, find_library, find_problem


def over_nccl(
    host: Group,
    nodes: Sequence[int],
    device: torch.device,
    required: bool,
    library: NcclLibrary | None = None,
) -> Group:
    """`host`, or an `NcclGroup` over it where every rank has CuPy, NCCL and a GPU of its own. Collective.

    nodes: of each rank, by number. library: in place of CuPy's. Raises `UserError` on every rank where NCCL
    is `required` and cannot be had, and where it can but fails. Without it GPU tensors go through host
    memory, of which the job's first rank warns.
    """
    lacks, card = "", ""
    if library is None:
        library, lacks = find_library()
    if library is not None:
        try:
            card = library.card(device)
        except Exception as error:  # whatever it is, the other ranks wait for news
            lacks = f"{type(error).__name__}: {error}"
    found = host.all_gather_objects((socket.gethostname(), card, lacks))
    problem = find_problem(host.ranks, nodes, found)
    if problem is None and library is not None:
        return NcclGroup.open(host, library, device)
    if required:
        raise UserError(
            f"communication backend: 'nccl' cannot serve the {host.name} group: {problem}; or use "
            "--comm-backend auto, which sends GPU tensors through host memory then"
        )
    if host.ranks[host.rank] == 0:
        print(
            f"spmd: warning: GPU tensors of the {host.name} group go through host memory, which is slow: "
            f"{problem}",
            file=sys.stderr,
        )
    return host
