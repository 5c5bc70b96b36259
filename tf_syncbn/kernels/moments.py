"""Counts, means and centred squares of one tower, and their exact merge over towers.

Tower i holds `n_i` values a channel with mean `m_i` and centred squares `M_i = sum (x - m_i)^2`. What crosses towers is
one vector of 3C + 1 numbers, the ingredients of these: vector arithmetic costs by the op, not by the number, so it is done
once where towers meet. The merge is that of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm
for computing sample variances", 1979). `E[x^2] - E[x]^2` is used only for data that was found to allow it: at a mean of 1e4
standard deviations it leaves no digit in float32.
"""
import tensorflow.compat.v1 as tf

__all__ = ["accumulator", "add_along", "along", "channel_sums", "is_small", "join_rows", "local_moments", "merge", "merge_groups",
           "multiply_along", "unpack"]

_LONGEST_PRODUCT = {"reduce": 0, "matmul": 512, "long matmul": 16384}  # rows that a product with ones may sum
# Numbers; for products with vectors shorter rows are joined to rows of up to so many. On 1.15.5 it would gain nothing.
_LONG_ROW = 0 if tf.__version__.startswith("1.") else 512
_SMALL = 1 << 17  # numbers of a tensor that ops read faster than some of TensorFlow's kernels start
# Rows summed at a time: each sum of equal numbers errs to the same side, and where the first sixteenth of the rows are all
# outliers, differences from its mean lose four bits more. By blocks of 256 a variance was off by 1.8e-5 then.
_BLOCK = 64
_SAMPLE = 16  # one row in so many is enough for a first mean
_LONG_SAMPLE = 4096  # rows of a sample above which its sum takes blocks
_FEW = 128  # rows that are taken whole: to choose among them takes longer
# Of rows that are summed as they are: sums no longer than speed needs, and the mean, in standard deviations, above which
# differences are summed. Products of 128 rows lose more with oneDNN, and are faster without (0.42 ms, of 64 rows 0.58; 1.15.5).
_SHORT_PRODUCT = {"reduce": 0, "matmul": 128 if tf.__version__.startswith("1.") else 64, "long matmul": 128}
_LARGE_MEAN = 4.0


def accumulator(dtype):
    """Returns the dtype that statistics of inputs of `dtype` are computed in: float64 for float64, else float32."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def along(vector, x, axis):
    """Returns a vector [C] in a shape that broadcasts to `x` along `axis`."""
    return vector if axis == x.shape.rank - 1 else tf.reshape(vector, [-1] + [1] * (x.shape.rank - 1 - axis))


def is_small(x, numbers=_SMALL):
    """Tells whether a tensor is known to be so small that what an op costs to start counts more than what it reads."""
    return x.shape.is_fully_defined() and x.shape.num_elements() <= numbers


def join_rows(x, vectors):
    """Takes several rows of channels as one, as many as divide their number and fit, and repeats vectors as often.

    On CPU TensorFlow is slow to apply a vector to short rows: to a megabyte in rows of 16 channels `bias_add` took 0.28 ms,
    in rows of 256 numbers 0.18 ms (two towers, 2.21.0; a copy 0.14 ms).

    Args:
      x: tensor, channels last.
      vectors: list of tensors [C].

    Returns:
      `x` as a tensor [R, joined C], and a list of tensors [joined C].
    """
    channels, size, joined = tf.dimension_value(x.shape[-1]), x.shape.num_elements(), 1
    while size and 2 * joined * channels <= _LONG_ROW and size % (2 * joined * channels) == 0:
        joined *= 2
    return tf.reshape(x, [-1, joined * channels]), [tf.tile(v, [joined]) if joined > 1 else v for v in vectors]


def add_along(x, vector, axis, joins=False):
    """Adds a vector [C] to `x` along `axis`, if `joins` by `join_rows`."""
    if axis != x.shape.rank - 1:
        return x + along(vector, x, axis)
    # On CPU a third faster than the broadcasting sum (1.15.5, 8 MB: 1.1 ms and 1.6 ms), elsewhere as fast.
    rows, (vector,) = join_rows(x, [vector]) if joins else (_rows(x), [vector])
    return tf.reshape(tf.nn.bias_add(rows, vector), _shape(x))


def multiply_along(x, vector, axis, joins=False):
    """Multiplies `x` by a vector [C] along `axis`, if `joins` by `join_rows`."""
    if axis != x.shape.rank - 1 or not joins:
        return x * along(vector, x, axis)
    rows, (vector,) = join_rows(x, [vector])
    return tf.reshape(rows * vector, _shape(x))


def channel_sums(x, axis, sums_by="reduce"):
    """Sums over all axes but the channels', in two levels.

    TensorFlow's CPU kernels add row to row: over a third of a million rows of float32 with a mean of 1e4 standard
    deviations the sum was off by 1e-3, and a variance built on it by 4e-3 (1.15.5). Sums of blocks, added up in float64,
    are no slower.

    Args:
      x: floating point tensor, C channels along `axis`.
      axis: int, not negative.
      sums_by: "reduce", or "matmul": products with ones where the number of rows is known and divides well, on CPU up to a
        third faster; on a GPU TF32 would round their inputs. "long matmul" are longer ones: without oneDNN TensorFlow 2 takes
        half the time for them, and sums in blocks by itself (the squares of 16,384 normal numbers: off by 1.3e-6).

    Returns:
      Tensor [C] of the dtype of `x`.
    """
    rank = x.shape.rank
    if axis != rank - 1:
        sums = tf.reduce_sum(x, list(range(axis + 1, rank)))
        return tf.reduce_sum(sums, list(range(axis))) if axis else sums
    rows = _rows(x)
    sums = _products(rows, _LONGEST_PRODUCT[sums_by])
    if sums is None:
        return tf.cast(_sum_blocks(_blocks(rows)), x.dtype)
    return tf.reshape(sums, [-1]) if sums.shape[0] == 1 else tf.reduce_sum(sums, 0)


def _products(rows, longest):
    """Sums rows [R, C] by products with ones, no more than `longest` each; returns sums [n, C], None if R is not divided so."""
    count, channels = (tf.dimension_value(size) for size in rows.shape)
    joined = 1
    while count and longest and count // joined > longest and count % (2 * joined) == 0:
        joined *= 2
    # A product adds row to row as well: 729 rows, sorted, gave a mean off by 4e-6 standard deviations.
    if not count or count // joined > longest:
        return None
    sums = tf.matmul(tf.ones([1, count // joined], rows.dtype), tf.reshape(rows, [count // joined, joined * channels]))
    return tf.reshape(sums, [joined, channels])


def _square_sums(x, axis, sums_by, sums):
    """Sums the squares over all axes but the channels'; see `channel_sums`. The squares are taken after `sums`."""
    if axis != x.shape.rank - 1:
        norms = tf.math.reduce_euclidean_norm(x, list(range(axis + 1, x.shape.rank)))
        return tf.reduce_sum(tf.square(norms), list(range(axis))) if axis else tf.square(norms)
    rows = _rows(x)
    count = tf.dimension_value(rows.shape[0])
    if count is not None and count <= 8 * _BLOCK or sums_by != "reduce" and is_small(x):
        with tf.control_dependencies([sums]):  # nobody reads `x` after it, so it may be written over
            return channel_sums(tf.square(rows), 1, sums_by)
    # A norm reads x once and writes no squares, which take as long as the sum. It is slow for few blocks: the moments of two
    # towers of 128 rows of 2,048 channels took 0.44 ms, by squares and products 0.25 ms (2.21.0), and the norm of two times
    # 4,096 rows of 32 channels 0.10 ms, squares and products 0.05 ms.
    return tf.cast(_sum_squares_of_blocks(_blocks(rows)), x.dtype)


def _rows(x):
    return tf.reshape(x, [-1, tf.dimension_value(x.shape[-1])])


def _shape(x):
    return x.shape.as_list() if x.shape.is_fully_defined() else tf.shape(x)


def _blocks(rows):
    """Divides rows [R, C] into blocks: a list of tensors [number of blocks, rows of a block, C], with a rest two."""
    count, channels = (tf.dimension_value(size) for size in rows.shape)
    if count is not None and count < 2 * _BLOCK:
        return [tf.expand_dims(rows, 0)]
    size = _BLOCK
    if count is not None:
        size = max([rows_each for rows_each in range(_BLOCK // 4, _BLOCK + 1) if count % rows_each == 0] or [_BLOCK])
    whole = _size(rows) // size * size
    if count == whole:
        return [tf.reshape(rows, [count // size, size, channels])]
    num_blocks = -1 if count is None else count // size
    return [tf.reshape(rows[:whole], [num_blocks, size, channels]), tf.expand_dims(rows[whole:], 0)]


def _sum_blocks(blocks):
    return _add_up([tf.reduce_sum(block, 1) for block in blocks])


def _sum_squares_of_blocks(blocks):
    return _add_up([tf.square(tf.math.reduce_euclidean_norm(block, 1)) for block in blocks])


def _add_up(sums):
    """Adds up a list of tensors [n, C] in float64, and returns that."""
    return tf.add_n([tf.reduce_sum(tf.cast(of_blocks, tf.float64), 0) for of_blocks in sums])


def local_moments(x, mask, axis, sums_by, as_it_is=False):
    """Computes one tower's part of the moments, from differences `d = x - s` from something near the mean.

    `s` is the mean of every position where they are few or masked, else that of the first sixteenth. That is near enough
    whatever the data: the mean of a part `f` of all values lies within `std / sqrt(f)` of the mean of all, so no more than
    the last four bits of the centred squares are lost.

    Args:
      x: floating point tensor, C channels along `axis`.
      mask: weights of the positions, in the accumulator's dtype, of a shape that broadcasts to `x`, size 1 along `axis`;
        or None.
      axis: int, not negative.
      sums_by: see `channel_sums`.
      as_it_is: whether to sum `x` itself where the data allows it, see `_sums_as_it_is`, if these are rows of channels and there
        is no mask; `s` is the mean then.

    Returns:
      Tensor [3C + 1] of the accumulator's dtype: the count n, s, sum d, sum d^2. All zero where nothing is counted.
    """
    is_narrow, x = x.dtype != accumulator(x.dtype), tf.cast(x, accumulator(x.dtype))
    count = _count(x, axis, mask)
    if as_it_is and mask is None and axis == x.shape.rank - 1:
        # Grappler moves a cast behind every reshape of it: products would be given one of their own.
        sums = _sums_as_it_is(_rows(x), count, "reduce" if is_narrow else sums_by)
        return tf.concat([tf.reshape(count, [1]), sums], 0)
    if mask is None:
        near = _first_mean(x, axis, sums_by)
        differences = add_along(x, -near, axis, sums_by != "reduce")
        sums = channel_sums(differences, axis, sums_by)
        squares = _square_sums(differences, axis, sums_by, sums)
    else:
        near = channel_sums(_masked(x, mask), axis, sums_by) * tf.div_no_nan(tf.ones([], x.dtype), count)
        differences = add_along(x, -near, axis, sums_by != "reduce")
        sums = channel_sums(_masked(differences, mask), axis, sums_by)
        squares = channel_sums(_masked(tf.square(differences), mask), axis, sums_by)
    return tf.concat([tf.reshape(count, [1]), near, sums, squares], 0)


def _sums_as_it_is(rows, count, sums_by):
    """Sums x and x^2, and where a mean is too large for that, differences from the mean and their squares.

    Differences would have to be written, which takes longer than to sum them: without them the moments of two towers of 4 MB
    took 1.36 ms, with them 1.74, with both 2.5 (2.21.0). But `sum x^2 - (sum x)^2 / n` is off by `1 + 3 mean^2 / var` times
    as much as the sums are. So these are of few rows each, added up in float64: at a mean of 4 standard deviations variances
    were off by 9e-6 at most, and by 4e-5 for numbers of two values alone. Where a mean is larger all rows are summed again, else
    none of them, so that it takes no control flow. In ResNets in training no mean was, but after a ResNet-50's pooling (7).

    Args:
      rows: floating point tensor [R, C].
      count: scalar tensor, R.
      sums_by: see `channel_sums`.

    Returns:
      Tensor [3C]: s, sum d, sum d^2, see `local_moments`; s is the mean.
    """
    products, blocks = _products(rows, _SHORT_PRODUCT[sums_by]), _blocks(rows)
    sums = _sum_blocks(blocks) if products is None else _add_up([products])
    squares = _sum_squares_of_blocks(blocks)
    mean = sums * tf.div_no_nan(tf.ones([], tf.float64), tf.cast(count, tf.float64))
    of_mean = mean * sums
    centred = squares - of_mean
    # Neither is so of NaN.
    are_right = tf.reduce_all(tf.logical_and(of_mean <= _LARGE_MEAN ** 2 * centred, centred <= rows.dtype.max))
    minus_mean = -tf.cast(mean, rows.dtype)
    again = [tf.nn.bias_add(block[:tf.where_v2(are_right, 0, _size(block))], minus_mean) for block in blocks]
    squares = tf.where_v2(are_right, centred, _sum_squares_of_blocks(again))
    return tf.cast(tf.concat([mean, _sum_blocks(again), squares], 0), rows.dtype)


def _size(x):
    size = tf.dimension_value(x.shape[0])
    return tf.shape(x)[0] if size is None else size


def _first_mean(x, axis, sums_by):
    """Returns the mean of a sample of `x`, near enough to its mean to take differences from."""
    sample = _rows(x) if axis == x.shape.rank - 1 else x
    count = tf.dimension_value(sample.shape[0])
    if axis and (count is None or count >= _FEW or sample is x):
        sample = sample[:(_size(sample) + _SAMPLE - 1) // _SAMPLE]
    sample_axis = axis if sample.shape.rank == x.shape.rank else 1
    size = _count(sample, sample_axis, None)
    if sample_axis == 1 and sample.shape.rank == 2 and 0 < (tf.dimension_value(sample.shape[0]) or 0) <= _LONG_SAMPLE:
        return tf.reduce_mean(sample, 0)
    return channel_sums(sample, sample_axis, sums_by) * tf.div_no_nan(tf.ones([], x.dtype), size)


def _masked(x, mask):
    return tf.where_v2(mask > 0, x * mask, tf.zeros_like(x))  # not a product alone: padding may hold NaN


def _count(x, axis, mask):
    if mask is None:
        sizes = [tf.dimension_value(size) for i, size in enumerate(x.shape) if i != axis]
        if None not in sizes:
            count = 1
            for size in sizes:
                count *= size
            return tf.constant(count, x.dtype)
        sizes = tf.shape(x, out_type=tf.int64)
        return tf.cast(tf.reduce_prod(tf.gather(sizes, [i for i in range(x.shape.rank) if i != axis])), x.dtype)
    sizes = [1 if i == axis else size for i, size in enumerate(tf.unstack(tf.shape(x)))]
    return tf.reduce_sum(tf.broadcast_to(mask, sizes))


def unpack(moments):
    """Splits a vector [2C + 1] into a count [], means [C] and biased variances [C]."""
    channels = (tf.dimension_value(moments.shape[0]) - 1) // 2
    count, mean, variance = tf.split(moments, [1, channels, channels])
    return tf.reshape(count, []), mean, variance


def merge(*per_tower):
    """Merges moments over towers.

        m_i = s_i + sum d / n_i,    M_i = sum d^2 - (sum d)^2 / n_i
        n = sum n_i,    m = sum n_i m_i / n,    M = sum M_i + sum n_i (m_i - m)^2,    var = M / n

    Args:
      *per_tower: a tensor [3C + 1] for each tower, from `local_moments`.

    Returns:
      Tensor [2C + 1]: the count, the means, the biased variances. All zero where nothing is counted.
    """
    packed = tf.stack(per_tower)
    channels = (tf.dimension_value(packed.shape[1]) - 1) // 3
    counts, near, sums, squares = tf.split(packed, [1, channels, channels, channels], axis=1)
    rests = tf.div_no_nan(sums, tf.broadcast_to(counts, tf.shape(sums)))
    means = near + rests
    squares = tf.maximum(squares - sums * rests, 0)
    count = tf.reduce_sum(counts, 0)
    share = tf.div_no_nan(tf.ones_like(count), count)
    # The mean of the towers' differences from the first one loses less than that of large means.
    first = means[:1]
    mean = first[0] + tf.reduce_sum(counts * (means - first), 0) * share
    squares = tf.reduce_sum(squares + counts * tf.square(means - mean), 0)
    return tf.concat([count, mean, squares * share], 0)


def merge_groups(*per_tower, group_size):
    """Merges moments within each group of consecutive towers, and over all towers.

    Args:
      *per_tower: a tensor [3C + 1] for each tower, from `local_moments`.
      group_size: int that divides the number of towers.

    Returns:
      A tuple of tensors [2C + 1], as `merge` returns them: one for each group, then that of all towers.
    """
    groups = [merge(*per_tower[i:i + group_size]) for i in range(0, len(per_tower), group_size)]
    return tuple(groups + (groups if len(groups) == 1 else [merge(*per_tower)]))
