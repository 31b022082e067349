/* boxes.c: strided boxes as messages for an exchange. A box that is larger than a message is cut along its outer dims: a message is a
 * run of rows with all that is inside of them. The cuts follow from the sizes alone, so that all members see the same list. */
#include "comm/comm_impl.h"

#include "base/mem.h"
#include "base/num.h"
#include "tensor/strided.h"

struct cut {
	uint64_t first;                /* message of the box */
	uint64_t rows;                 /* of dim `dim` in a message */
	uint64_t runs;                 /* messages to a whole of dim `dim` */
	uint32_t dim;                  /* those in front of it are cut into single indices */
};

struct comm_boxes {
	const struct comm_box *boxes;
	struct cut *cuts;              /* count + 1 of them: the last one ends the list */
	struct comm_message *messages;
	uint64_t count;
};

static FALLIBLE enum err check_box(const struct comm_box *b, uint64_t index, uint64_t *bytes_out)
{
	uint64_t bytes = b->item_bytes;

	if (b->ndim > NDIM_MAX || b->item_bytes < 1 || b->item_bytes > COMM_BLOCK_MAX)
		return ERR(INVALID_REQUEST, "box %llu has %u dims of items of %u bytes", (unsigned long long)index, b->ndim,
			   b->item_bytes);
	for (uint32_t d = 0; d < b->ndim; d++) {
		if (b->sizes[d] < 0)
			return ERR(INVALID_REQUEST, "box %llu has a negative size", (unsigned long long)index);
		if (b->sizes[d] == 0)
			bytes = 0;
	}
	for (uint32_t d = 0; d < b->ndim; d++)
		TRY(num_mul(bytes, (uint64_t)b->sizes[d], &bytes));
	*bytes_out = bytes;
	return OK;
}

/* From the innermost dim outwards as long as all of it fits a message. */
static uint64_t cut_box(const struct comm_box *b, uint64_t total, struct cut *cut)
{
	uint64_t row = b->item_bytes;
	uint32_t d = b->ndim;

	cut->dim = 0;
	cut->rows = cut->runs = 1;
	if (total == 0)
		return 0;
	while (d > 0 && row * (uint64_t)b->sizes[d - 1] <= COMM_BLOCK_MAX)
		row *= (uint64_t)b->sizes[--d];
	if (d == 0)
		return 1;
	cut->dim = d - 1;
	cut->rows = COMM_BLOCK_MAX / row;
	cut->runs = num_div_up((uint64_t)b->sizes[d - 1], cut->rows);
	return box_volume(cut->dim, b->sizes) * cut->runs;
}

/* The box of one message: where it begins, and its sizes. */
static void piece(const struct comm_box *b, const struct cut *cut, uint64_t nth, int64_t *src_off, int64_t *dst_off, int64_t *sizes)
{
	uint64_t run = nth % cut->runs, rest = nth / cut->runs;

	*src_off = *dst_off = 0;
	for (uint32_t d = 0; d < b->ndim; d++)
		sizes[d] = b->sizes[d];
	if (b->ndim == 0 || (cut->dim == 0 && cut->runs == 1))
		return;
	int64_t first = (int64_t)(run * cut->rows);
	sizes[cut->dim] = (int64_t)num_min(cut->rows, (uint64_t)(b->sizes[cut->dim] - first));
	*src_off = b->src ? first * b->src_strides[cut->dim] : 0;
	*dst_off = b->dst ? first * b->dst_strides[cut->dim] : 0;
	for (uint32_t d = cut->dim; d-- > 0;) {
		int64_t i = (int64_t)(rest % (uint64_t)b->sizes[d]);
		rest /= (uint64_t)b->sizes[d];
		sizes[d] = 1;
		*src_off += b->src ? i * b->src_strides[d] : 0;
		*dst_off += b->dst ? i * b->dst_strides[d] : 0;
	}
}

static uint32_t piece_bytes(const struct comm_box *b, const int64_t *sizes)
{
	return (uint32_t)(b->item_bytes * box_volume(b->ndim, sizes));
}

/* Boxes without elements have no message: the last box that begins at or before it and is not empty. */
static uint64_t box_of(const struct comm_boxes *b, uint64_t message)
{
	uint64_t low = 0, high = b->count;

	while (high - low > 1) {
		uint64_t mid = low + (high - low) / 2;
		if (b->cuts[mid].first <= message)
			low = mid;
		else
			high = mid;
	}
	return low;
}

static enum err move_piece(const struct comm_boxes *b, uint64_t message, void *out, const void *in)
{
	uint64_t i = box_of(b, message);
	const struct comm_box *box = &b->boxes[i];
	int64_t src_off, dst_off, sizes[NDIM_MAX], dense[NDIM_MAX];
	struct strided s;

	piece(box, &b->cuts[i], message - b->cuts[i].first, &src_off, &dst_off, sizes);
	strided_c_order(box->ndim, sizes, box->item_bytes, dense);
	strided_init(&s, box->ndim, sizes, out ? dense : box->dst_strides, out ? box->src_strides : dense, box->item_bytes);
	if (out)
		strided_copy(&s, out, (const unsigned char *)box->src + src_off);
	else
		strided_copy(&s, (unsigned char *)box->dst + dst_off, in);
	return OK;
}

static enum err pack_piece(void *user, uint64_t message, void *out)
{
	return move_piece(user, message, out, NULL);
}

static enum err unpack_piece(void *user, uint64_t message, const void *in)
{
	return move_piece(user, message, NULL, in);
}

static FALLIBLE enum err list_messages(struct comm_boxes *b, uint64_t total)
{
	b->messages = mem_zalloc(total, sizeof *b->messages);
	NEED(b->messages, "no memory for %llu messages", (unsigned long long)total);
	for (uint64_t i = 0; i < b->count; i++) {
		const struct comm_box *box = &b->boxes[i];
		for (uint64_t m = b->cuts[i].first; m < b->cuts[i + 1].first; m++) {
			int64_t src_off, dst_off, sizes[NDIM_MAX];
			piece(box, &b->cuts[i], m - b->cuts[i].first, &src_off, &dst_off, sizes);
			b->messages[m] = (struct comm_message){ box->from, box->to, piece_bytes(box, sizes) };
		}
	}
	return OK;
}

enum err comm_boxes_new(uint32_t size, const struct comm_box *boxes, uint64_t count, struct comm_boxes **out)
{
	struct comm_boxes *b = mem_zalloc(1, sizeof *b);
	uint64_t total = 0, bytes;
	enum err e = OK;

	NEED(b, "no memory for boxes");
	b->boxes = boxes;
	b->count = count;
	b->cuts = mem_zalloc(count + 1, sizeof *b->cuts);
	if (!b->cuts)
		e = ERR(NO_MEMORY, "no memory for %llu boxes", (unsigned long long)count);
	for (uint64_t i = 0; !e && i < count; i++) {
		b->cuts[i].first = total;
		e = check_box(&boxes[i], i, &bytes);
		if (!e && (boxes[i].from >= size || boxes[i].to >= size))
			e = ERR(INVALID_REQUEST, "box %llu goes from %u to %u in a group of %u", (unsigned long long)i, boxes[i].from,
				boxes[i].to, size);
		e = e ?: num_add(total, cut_box(&boxes[i], bytes, &b->cuts[i]), &total);
	}
	if (!e) {
		b->cuts[count].first = total;
		e = list_messages(b, total);
	}
	if (e) {
		comm_boxes_free(b);
		return e;
	}
	*out = b;
	return OK;
}

struct comm_exchange comm_boxes_exchange(struct comm_boxes *b)
{
	return (struct comm_exchange){ b->messages, b->cuts[b->count].first, pack_piece, unpack_piece, b };
}

void comm_boxes_free(struct comm_boxes *b)
{
	if (!b)
		return;
	mem_free(b->cuts);
	mem_free(b->messages);
	mem_free(b);
}
