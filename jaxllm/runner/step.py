"""The compiled step: state changes, the model, sampling. One call computes any plan that fits the bucket.

A call may do several steps of one token a row, in a loop on the device, where the host is slower than the device.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.kernels.ragged_paged_attention import Sizes, prepare_attention
from jaxllm.models.attention import LayerCache, Placement
from jaxllm.models.transformer import Decoder
from jaxllm.parallel.sharding import REPLICATED
from jaxllm.runner.device_state import DeviceState, SamplingState
from jaxllm.runner.sampler import Sample, sample
from jaxllm.runner.step_input import StepInput


class Tokens(NamedTuple):
    """Every token of the step, padding included."""

    ids: Int[Array, " tokens"]
    seat: Int[Array, " tokens"]
    position: Int[Array, " tokens"]
    valid: Bool[Array, " tokens"]


type Cache = tuple[LayerCache, ...]


def run_steps(
    model: Decoder, cache: Cache, state: DeviceState, step: StepInput, max_steps: int
) -> tuple[Cache, DeviceState, Int[Array, "steps 2 rows"]]:
    """Computes as many steps as the rows take, `max_steps` at the most.

    Returns:
        The cache and the state, both updated, and one int32 array for the host: per step the sampled token
        ids, and the bits of their float32 log-probabilities.
    """
    state = apply_changes(state, step)
    if max_steps == 1:
        cache, state, output = run_step(model, cache, state, step)
        return cache, state, output[None]

    def one_step(carry):
        index, cache, state, outputs = carry
        cache, state, output = run_step(model, cache, state, step.after(index))
        return index + 1, cache, state, outputs.at[index].set(output)

    outputs = jnp.zeros((max_steps, 2, step.seats.shape[0]), jnp.int32)
    num_steps = step.num_steps.max()
    begin = (jnp.int32(0), cache, state, outputs)
    _, cache, state, outputs = jax.lax.while_loop(lambda carry: carry[0] < num_steps, one_step, begin)
    return cache, state, outputs


def run_step(
    model: Decoder, cache: Cache, state: DeviceState, step: StepInput
) -> tuple[Cache, DeviceState, Int[Array, "2 rows"]]:
    """Computes one step: of each token its K/V, of each row the next token."""
    with jax.named_scope("prepare"):
        tokens = lay_out_tokens(state, step)
        seats = jnp.where(tokens.valid, tokens.seat, state.seen.shape[0])
        state = state._replace(seen=state.seen.at[seats, tokens.ids].set(True, mode="drop"))
        placement = place_tokens(model, state, step, tokens, cache[0].keys.shape)
    hidden, cache = model(tokens.ids, tokens.position, cache, placement)
    last = jnp.maximum(step.query_start[1:] - 1, 0)
    logits = model.logits(hidden[last])
    with jax.named_scope("sample"):
        rows = SamplingState(*(field[step.seats] for field in state.sampling))
        choose = jax.shard_map(
            partial(sample, backend=model.setting.backend),
            mesh=model.setting.mesh,
            in_specs=REPLICATED,
            out_specs=REPLICATED,
            check_vma=False,
        )
        sampled = choose(logits, rows, state.seen, step.seats, step.context_lens)
        state = remember(state, step, sampled)
    bits = jax.lax.bitcast_convert_type(sampled.logprobs, jnp.int32)
    return cache, state, jnp.stack([sampled.token_ids, bits])


def apply_changes(state: DeviceState, step: StepInput) -> DeviceState:
    """Writes new table entries and the sampling state of admitted seats."""
    table = tell_blocks(state.block_table, step)
    if step.admitted_seats.shape[0] == 0:
        return state._replace(block_table=table)
    seats = step.admitted_seats
    fields = zip(state.sampling, step.admitted, strict=True)
    sampling = SamplingState(*(old.at[seats].set(new) for old, new in fields))
    # As a mask over all seats: a scatter of whole rows, most of them to the trash seat, takes 100 ms on a GPU.
    fresh = jnp.zeros(state.seen.shape[0], jnp.bool_).at[step.fresh_seats].set(True)
    return state._replace(block_table=table, sampling=sampling, seen=state.seen & ~fresh[:, None])


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
    num_blocks, block_size = cache_shape[:2]
    block = state.block_table[tokens.seat, tokens.position // block_size]
    work = prepare_attention(
        state.block_table[step.seats],
        step.context_lens,
        step.query_start,
        sizes=Sizes(tokens.ids.shape[0], block_size, model.config.group_size, model.config.head_dim),
        backend=model.setting.backend,
    )
    return Placement(
        block=jnp.where(tokens.valid, block, num_blocks),
        offset=tokens.position % block_size,
        attention_work=work,
    )


def remember(state: DeviceState, step: StepInput, sampled: Sample) -> DeviceState:
    """Keeps each sampled token by seat: it is the input of the seat's next step."""
    kept = jnp.where(step.samples, sampled.token_ids, state.last_token[step.seats])
    return state._replace(last_token=state.last_token.at[step.seats].set(kept))
