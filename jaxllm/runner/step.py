"""The compiled step: state changes, the model, sampling. One call computes any plan that fits the bucket.

A call may do several steps of one token a row, in a loop on the device, where the host is slower than the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.kernels.ragged_paged_attention import Sizes, prepare_attention
from jaxllm.models.attention import LayerCache, Placement
from jaxllm.models.transformer import Decoder
from jaxllm.parallel.sharding import REPLICATED
from jaxllm.runner.device_state import DeviceState, History, SamplingState, Tables
from jaxllm.runner.logit_changes import Rows, note_tokens
from jaxllm.runner.sampler import Sample
from jaxllm.runner.step_input import StepInput
from jaxllm.runner.token_details import PACKED_WIDTH


class Tokens(NamedTuple):
    """Every token of the step, padding included."""

    ids: Int[Array, " tokens"]
    seat: Int[Array, " tokens"]
    position: Int[Array, " tokens"]
    valid: Bool[Array, " tokens"]


type Cache = tuple[LayerCache, ...]


class StepResult(NamedTuple):
    """What a call brings; what the host does not ask for stays on the device."""

    sampled: Int[Array, "*steps 2 rows"]
    """Token ids, and the bits of their float32 log-probabilities."""
    details: Int[Array, "*steps rows packed"]
    """Packed `Details` of the sampled tokens."""
    hidden: Float[Array, "tokens hidden"] | None
    """Hidden states of all tokens, from a call of one step: prompts are scored by them."""


type Sampler = Callable[[Array, Rows, History, Tables], Sample]
"""`sample` for one engine."""


def run_steps(
    model: Decoder, cache: Cache, state: DeviceState, step: StepInput, sampler: Sampler, max_steps: int
) -> tuple[Cache, DeviceState, StepResult]:
    """Computes as many steps as the rows take, `max_steps` at the most.

    Returns:
        The cache and the state, both updated, and what is for the host.
    """
    with jax.named_scope("prepare"):
        state = apply_changes(state, step)
    if max_steps == 1:
        cache, state, result = run_step(model, cache, state, step, sampler)
        return cache, state, StepResult(result.sampled[None], result.details[None], result.hidden)

    def one_step(carry):
        index, cache, state, results = carry
        cache, state, result = run_step(model, cache, state, step.after(index), sampler)
        latest = result.sampled, result.details
        results = tuple(every.at[index].set(one) for every, one in zip(results, latest, strict=True))
        return index + 1, cache, state, results

    rows = step.seats.shape[0]
    results = tuple(jnp.zeros((max_steps, *shape), jnp.int32) for shape in ((2, rows), (rows, PACKED_WIDTH)))
    num_steps = step.num_steps.max()
    _, cache, state, results = jax.lax.while_loop(
        lambda carry: carry[0] < num_steps, one_step, (jnp.int32(0), cache, state, results)
    )
    return cache, state, StepResult(*results, hidden=None)


def run_step(
    model: Decoder, cache: Cache, state: DeviceState, step: StepInput, sampler: Sampler
) -> tuple[Cache, DeviceState, StepResult]:
    """Computes one step: of each token its K/V, of each row the next token."""
    with jax.named_scope("prepare"):
        tokens = lay_out_tokens(state, step)
        placement = place_tokens(model, state, step, tokens, cache[0].keys.shape)
    hidden, cache = model(tokens.ids, tokens.position, cache, placement)
    with jax.named_scope("head"):
        last = hidden[jnp.maximum(step.query_start[1:] - 1, 0)]
    logits = model.logits(last)
    with jax.named_scope("sample"):
        sampling = SamplingState(*(field[step.seats] for field in state.sampling))
        rows = Rows(sampling, step.seats, step.context_lens)
        choose = jax.shard_map(
            sampler,
            mesh=model.setting.mesh,
            in_specs=REPLICATED,
            out_specs=REPLICATED,
            check_vma=False,
        )
        sampled = choose(logits, rows, state.history, state.tables)
        state = remember(state, step, sampled)
        bits = jax.lax.bitcast_convert_type(sampled.logprobs, jnp.int32)
        result = StepResult(jnp.stack([sampled.token_ids, bits]), sampled.details.pack(), hidden)
    return cache, state, result


def apply_changes(state: DeviceState, step: StepInput) -> DeviceState:
    """Writes new table entries and the sampling state of admitted seats."""
    table = tell_blocks(state.block_table, step)
    if step.admitted_seats.shape[0] == 0:
        return state._replace(block_table=table)
    seats = step.admitted_seats
    fields = zip(state.sampling, step.admitted, strict=True)
    sampling = SamplingState(*(old.at[seats].set(new) for old, new in fields))
    return state._replace(block_table=table, sampling=sampling)


def tell_blocks(table: Int[Array, "seats max_blocks"], step: StepInput) -> Int[Array, "seats max_blocks"]:
    """Writes every row's new blocks into the table of its seat; padding is dropped."""
    index = jnp.arange(step.new_blocks.shape[0])
    row = jnp.searchsorted(step.block_start[1:], index, side="right", method="compare_all")
    row = jnp.minimum(row, step.seats.shape[0] - 1)
    seat = jnp.where(index < step.block_start[-1], step.seats[row], table.shape[0])
    column = step.first_block[row] + index - step.block_start[row]
    return table.at[seat, column].set(step.new_blocks, mode="drop", unique_indices=True)


def lay_out_tokens(state: DeviceState, step: StepInput) -> Tokens:
    """Finds each token's seat and position, and fills in those only the device knows."""
    index = jnp.arange(step.token_ids.shape[0])
    row = jnp.searchsorted(step.query_start[1:], index, side="right", method="compare_all")
    row = jnp.minimum(row, step.seats.shape[0] - 1)
    valid = (index < step.query_start[-1]) & (step.context_lens[row] > 0)
    seat = jnp.where(valid, step.seats[row], state.last_token.shape[0] - 1)
    position = step.context_lens[row] - (step.query_start[row + 1] - index)
    is_last = index == step.query_start[row + 1] - 1
    ids = jnp.where(step.pending[row] & is_last, state.last_token[seat], step.token_ids)
    return Tokens(ids, seat, jnp.where(valid, position, 0), valid)


def place_tokens(
    model: Decoder, state: DeviceState, step: StepInput, tokens: Tokens, cache_shape: tuple[int, ...]
) -> Placement:
    """Looks up the slot of every token, and prepares attention for all layers.

    Padding tokens have no slot: if they shared one, a GPU would write them one after the other, for 100 ms.
    """
    (num_blocks, block_size), config = cache_shape[:2], model.config
    block = state.block_table[tokens.seat, tokens.position // block_size]
    decodes = step.admitted_seats.shape[0] == 0
    work = prepare_attention(
        state.block_table[step.seats],
        step.context_lens,
        step.query_start,
        sizes=Sizes(
            tokens.ids.shape[0],
            block_size,
            config.group_size,
            config.head_dim,
            single_queries=decodes,
            invariant=model.setting.batch_invariant,
        ),
        backend=model.setting.backend,
    )
    return Placement(
        block=jnp.where(tokens.valid, block, num_blocks),
        offset=tokens.position % block_size,
        attention_work=work,
    )


def remember(state: DeviceState, step: StepInput, sampled: Sample) -> DeviceState:
    """Keeps each sampled token by seat: it is the input of the seat's next step, and counts from then on."""
    kept = jnp.where(step.samples, sampled.token_ids, state.last_token[step.seats])
    state = state._replace(last_token=state.last_token.at[step.seats].set(kept))
    # A GPU would write the rows of one seat one after the other, for 100 ms: padding has no seat here.
    seats = jnp.where(step.samples, step.seats, state.last_token.shape[0])
    return note_tokens(state, seats, sampled.token_ids)
