"""How a unit is cut: everything is covered once, aligned, and every tensor is contiguous in the buffer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.plan.pieces import ALIGN_BYTES, PAGE_BYTES, TensorSize, cut_unit

units = st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), min_size=1, max_size=12)


@given(units, st.sampled_from([2, 4]), st.sampled_from([2048, 4096, 16384]), st.sampled_from([8, 10, 12]))
def test_pieces_cover_every_element_once_and_lie_where_the_store_can_read_them(sizes, element_bytes, most, per_element):
    tensors = [TensorSize(f"t{i}", count, trainable) for i, (count, trainable) in enumerate(sizes)]
    cut = cut_unit(tensors, element_bytes=element_bytes, state_bytes=lambda n: per_element * n, piece_elements=most)
    position = 0
    for piece in cut.pieces:
        assert piece.weights_offset % PAGE_BYTES == 0
        assert piece.weights_offset == position
        assert piece.num_elements <= most
        position = -(-(piece.weights_offset + piece.weights_bytes) // PAGE_BYTES) * PAGE_BYTES
        kinds = {tensors[chunk.tensor].trainable for chunk in piece.chunks}
        assert kinds == {bool(piece.state_bytes)}
        state_end = 0
        for chunk in piece.chunks:
            size = chunk.num_elements * element_bytes
            assert piece.weights_offset <= chunk.weights_offset
            assert chunk.weights_offset + size <= piece.weights_offset + piece.weights_bytes
            assert chunk.weights_offset % ALIGN_BYTES == 0
            if piece.state_bytes:
                assert chunk.state_offset >= state_end
                state_end = chunk.state_offset + per_element * chunk.num_elements
                assert state_end <= piece.state_bytes
    assert cut.weights_bytes == position
    for index, tensor in enumerate(tensors):
        chunks = [chunk for piece in cut.pieces for chunk in piece.chunks if chunk.tensor == index]
        assert sum(chunk.num_elements for chunk in chunks) == tensor.num_elements
        for chunk in chunks:  # contiguous: where an element lies follows from where the tensor starts
            assert chunk.weights_offset == cut.tensor_offset[index] + chunk.start * element_bytes


def test_a_piece_that_is_no_whole_page_is_refused():
    with pytest.raises(ValueError, match="multiple of 2048"):
        cut_unit([TensorSize("t", 5)], element_bytes=2, state_bytes=lambda n: n, piece_elements=1000)
