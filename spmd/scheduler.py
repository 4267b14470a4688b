"""Decides what each micro-batch holds. Deterministic: every rank of a replica runs it and agrees.

Sequences are spread over `num_lanes` lanes; a lane has at most one micro-batch in flight, so as many
lanes as pipeline stages keep every stage busy. Batching is continuous (Orca, Yu et al. 2022): sequences
join and leave between steps, and long prompts are computed in chunks under a token budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from spmd.block_pool import BLOCK_SIZE, BlockPool, blocks_for
from spmd.request import Sequence

SCORED_CHUNK = 256  # prompt tokens a step when every one of them needs logits


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a sequence to compute in one micro-batch."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """The chunk reaches the sequence's end, so its last token's logits choose the next one."""
        return self.stop == self.sequence.num_tokens and self.sequence.request.max_tokens > 0


class Scheduler:
    """Waiting and running sequences, and the cache blocks they hold."""

    def __init__(
        self,
        pool: BlockPool,
        num_lanes: int,
        max_batch_tokens: int,
        max_running: int,
        rope_switch_length: int | None = None,
    ) -> None:
        """max_batch_tokens and max_running (sequences) are per lane. When a sequence grows past
        rope_switch_length, its keys are computed anew, since they were rotated for short inputs."""
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.rope_switch_length = rope_switch_length
        self.waiting: deque[Sequence] = deque()
        self.running: list[list[Sequence]] = [[] for _ in range(num_lanes)]
        self.num_preemptions = 0
        self._computing: dict[bytes, Sequence] = {}  # full blocks that a running sequence is about to fill

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError when the cache could never hold it."""
        longest = len(sequence.request.prompt_token_ids) + sequence.request.max_tokens
        if blocks_for(longest) > self.pool.num_blocks:
            raise ValueError(f"{longest} tokens can never fit in {self.pool.num_blocks} cache blocks")
        self.waiting.append(sequence)

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + sum(map(len, self.running))

    def schedule(self, lane: int) -> list[Chunk]:
        """The lane's next micro-batch, single-token chunks first. Blocks for it are allocated."""
        chunks: dict[int, Chunk] = {}
        budget = self.max_batch_tokens
        preemptions = self.num_preemptions
        for sequence in sorted(self.running[lane], key=_prefilling):
            if sequence not in self.running[lane]:
                continue  # preempted by one before it
            self._restart_if_rope_switches(sequence)
            count = self._chunk_size(sequence, budget)
            if count == 0:
                continue
            while not self._reserve(sequence, sequence.num_computed + count):
                victim = self.running[lane][-1]
                self._preempt(lane, victim)
                dropped = chunks.pop(id(victim), None)
                budget += dropped.stop - dropped.start if dropped else 0
                if victim is sequence:
                    break
            else:
                chunks[id(sequence)] = self._chunk(sequence, count)
                budget -= count
        if self.num_preemptions == preemptions:
            for chunk in self._admit(lane, budget):
                chunks[id(chunk.sequence)] = chunk
        return sorted(chunks.values(), key=lambda chunk: chunk.stop - chunk.start > 1)

    def computed(self, chunks: list[Chunk]) -> None:
        """The chunks' keys and values are in the cache. Call before sampled tokens are appended."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            full = chunk.stop // BLOCK_SIZE
            if self.pool.caching:
                for index, key in enumerate(sequence.block_keys(full)[chunk.start // BLOCK_SIZE :]):
                    self.pool.publish(sequence.blocks[chunk.start // BLOCK_SIZE + index], key)
                    self._computing.pop(key, None)
            if sequence.request.max_tokens == 0 and chunk.stop == sequence.num_tokens:
                sequence.finish_reason = "length"

    def release_finished(self, lane: int) -> list[Sequence]:
        """Take finished sequences out of the lane and let their blocks go."""
        finished = [s for s in self.running[lane] if s.finish_reason is not None]
        if finished:
            self.running[lane] = [s for s in self.running[lane] if s.finish_reason is None]
            for sequence in finished:
                self._release(sequence)
        return finished

    def drop_waiting(self, sequence: Sequence) -> bool:
        """Forget a sequence that has not started, or was preempted; False when it is not waiting."""
        if sequence not in self.waiting:
            return False
        self.waiting.remove(sequence)
        return True

    def drop_finished_waiting(self) -> None:
        """Forget waiting sequences that were given a finish reason."""
        self.waiting = deque(s for s in self.waiting if s.finish_reason is None)

    def check(self) -> None:
        """Raise AssertionError if a block is lost or miscounted, or a sequence lacks blocks."""
        sequences = [s for lane in self.running for s in lane]
        self.pool.check([s.blocks for s in sequences])
        for sequence in sequences:
            if len(sequence.blocks) < blocks_for(sequence.num_computed):
                raise AssertionError(f"{sequence.request.request_id}: computed tokens without blocks")
        if any(s.blocks or s.num_computed for s in self.waiting):
            raise AssertionError("a waiting sequence holds blocks")
        if any(owner not in sequences for owner in self._computing.values()):
            raise AssertionError("a block is awaited from a sequence that is not running")

    def _admit(self, lane: int, budget: int) -> list[Chunk]:
        """Start waiting sequences, in order, while budget, blocks and the lane's share last.

        One whose next block is just being computed by another waits for it, and lets others by; one that
        lacks memory does not, so that it is never starved.
        """
        chunks = []
        for sequence in list(self.waiting):
            if not budget or not self._has_room(lane):
                break
            keys = sequence.block_keys(self._usable_blocks(sequence)) if self.pool.caching else []
            shared = self.pool.find(keys)
            if len(shared) < len(keys) and keys[len(shared)] in self._computing:
                continue
            # Room for all its tokens and the next one, or it would be thrown out again at once.
            missing = blocks_for(sequence.num_tokens + 1) - len(shared)
            if missing > self.pool.num_free - sum(map(self.pool.is_idle, shared)):
                break
            self.waiting.remove(sequence)
            self.running[lane].append(sequence)
            self.pool.share(shared)
            sequence.blocks = list(shared)
            sequence.num_computed = len(shared) * BLOCK_SIZE
            self._count_hits(sequence)
            if self.pool.caching:
                for key in sequence.block_keys(sequence.num_tokens // BLOCK_SIZE)[len(shared) :]:
                    self._computing.setdefault(key, sequence)
            count = self._chunk_size(sequence, budget)
            self._reserve(sequence, sequence.num_computed + count)
            chunks.append(self._chunk(sequence, count))
            budget -= count
        return chunks

    def _usable_blocks(self, sequence: Sequence) -> int:
        """Full blocks that may come from the cache: not all, since the last token must run; none when the
        prompt's own logits are wanted."""
        if sequence.wants_prompt_scores:
            return 0
        return (sequence.num_tokens - 1) // BLOCK_SIZE

    def _count_hits(self, sequence: Sequence) -> None:
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
            self.pool.queried_tokens += sequence.num_tokens
            self.pool.cached_tokens += sequence.num_computed

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        limit = SCORED_CHUNK if sequence.wants_prompt_scores else budget
        return min(sequence.num_tokens - sequence.num_computed, budget, limit)

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        switch = self.rope_switch_length
        sequence.long_rope = switch is not None and sequence.num_tokens > switch
        return Chunk(sequence, sequence.num_computed, sequence.num_computed + count)

    def _has_room(self, lane: int) -> bool:
        # An equal share for each lane, so that no pipeline slot runs empty while another is full.
        share = -(-self.num_unfinished // len(self.running))
        return len(self.running[lane]) < min(share, self.max_running)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        missing = blocks_for(tokens) - len(sequence.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def _restart_if_rope_switches(self, sequence: Sequence) -> None:
        switch = self.rope_switch_length
        if switch is not None and sequence.num_tokens > switch and not sequence.long_rope:
            sequence.num_computed = 0

    def _preempt(self, lane: int, sequence: Sequence) -> None:
        # By recomputation: its tokens are kept, its keys and values only as far as the prefix cache lasts.
        self.running[lane].remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._computing = {key: owner for key, owner in self._computing.items() if owner is not sequence}


def _prefilling(sequence: Sequence) -> bool:
    return sequence.num_tokens - sequence.num_computed > 1
