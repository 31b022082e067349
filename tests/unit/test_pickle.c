/* test_pickle.c: streams written by hand, one rule each. Real files:
 * tests/interop/test_metadata.py. */
#include "lib/t.h"

#include "base/mem.h"
#include "format/pickle.h"

static const struct pickle_record point[] = {
	{ "m", "Point", 7, 2, { "x", "y" } },
	{ NULL, NULL, 0, 0, { NULL } },
};

#define PARSE(literal, pk) T_OK(pickle_parse(literal, sizeof(literal) - 1, point, pk))

/* The stream must be refused; the message holds `says`, the offset is that of the opcode. */
static void refused(const char *bytes, size_t n, const char *says, int64_t offset)
{
	struct pickle *pk;

	T_ERR(FORMAT_PICKLE, pickle_parse(bytes, n, point, &pk));
	if (!strstr(err_last()->text, says))
		T_FAIL("'%s' does not say '%s'", err_last()->text, says);
	assert_int_equal(err_last()->offset, offset);
}
#define REFUSED(literal, says, offset) refused(literal, sizeof(literal) - 1, says, offset)

static void is_int(const struct pickle *pk, pnode n, int64_t want)
{
	int64_t got = 0;

	assert_true(pickle_int(pk, n, &got));
	assert_int_equal(got, want);
}

static void is_str(struct str got, const char *want)
{
	if (!str_is(got, want))
		T_FAIL("'%.*s' is not '%s'", (int)got.n, got.p, want);
}

static void numbers(void **state)
{
	struct pickle *pk;
	double v;
	bool decimal = true;
	(void)state;

	PARSE("(K\xffM\xff\xffJ\xff\xff\xff\xffJ\x00\x00\x00\x80\x8a\x00\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"
	      "\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00\x8b\x01\x00\x00\x00\x80G\x3f\xf8\x00\x00\x00\x00\x00\x00"
	      "I-12\nI01\nL99999999999999999999L\nF-2.5e3\nt.", &pk);
	pnode t = pickle_root(pk);
	const int64_t want[] = { 255, 65535, -1, INT32_MIN, 0, INT64_MIN };
	for (unsigned i = 0; i < 6; i++)
		is_int(pk, pickle_at(pk, t, i), want[i]);
	assert_int_equal(pickle_kind(pk, pickle_at(pk, t, 6)), PK_BIGINT);
	assert_int_equal(pickle_bigint(pk, pickle_at(pk, t, 6), &decimal).n, 9);
	assert_false(decimal);
	is_int(pk, pickle_at(pk, t, 7), -128);
	assert_true(pickle_float(pk, pickle_at(pk, t, 8), &v) && v == 1.5);
	is_int(pk, pickle_at(pk, t, 9), -12);
	assert_int_equal(pickle_kind(pk, pickle_at(pk, t, 10)), PK_BOOL);
	assert_true(pickle_is_true(pk, pickle_at(pk, t, 10)));
	is_str(pickle_bigint(pk, pickle_at(pk, t, 11), &decimal), "99999999999999999999");
	assert_true(decimal);
	assert_true(pickle_float(pk, pickle_at(pk, t, 12), &v) && v == -2500);
	assert_int_equal(pickle_count(pk, t), 13);
	assert_int_equal(pickle_at(pk, t, 13), 0);
	pickle_free(pk);
}

static void strings(void **state)
{
	struct pickle *pk;
	(void)state;

	PARSE("(X\x03\x00\x00\x00" "abc\x8c\x03\xed\xa0\x80V\\u20ac\xe9\\\\u\nS'a\\x41\\n\\''\nU\x01\xff"
	      "C\x02\x00\xff\x96\x01\x00\x00\x00\x00\x00\x00\x00zt.", &pk);
	pnode t = pickle_root(pk);
	is_str(pickle_str(pk, pickle_at(pk, t, 0)), "abc");
	is_str(pickle_str(pk, pickle_at(pk, t, 1)), "\xed\xa0\x80");
	is_str(pickle_str(pk, pickle_at(pk, t, 2)), "\xe2\x82\xac\xc3\xa9\\\\u");
	is_str(pickle_str(pk, pickle_at(pk, t, 3)), "aA\n'");
	assert_int_equal(pickle_kind(pk, pickle_at(pk, t, 4)), PK_BYTES); /* Python 2, not ASCII */
	assert_int_equal(pickle_bytes(pk, pickle_at(pk, t, 5)).n, 2);
	assert_int_equal(pickle_kind(pk, pickle_at(pk, t, 6)), PK_BYTEARRAY);
	is_str(pickle_str(pk, pickle_at(pk, t, 5)), ""); /* of another kind: nothing */
	pickle_free(pk);
}

static void containers(void **state)
{
	struct pickle *pk;
	(void)state;

	/* {'a': [1, 2, 3], 'b': {4}, 'c': frozenset({5})}, the list in three steps with something between */
	PARSE("}(U\x01" "a](K\x01K\x02" "eK\x03" "aU\x01" "b\x8f(K\x04\x90U\x01" "c(K\x05\x91uU\x01" "dNs.", &pk);
	pnode root = pickle_root(pk), list = pickle_dict_get(pk, root, "a"), item;
	assert_int_equal(pickle_count(pk, root), 4);
	assert_int_equal(pickle_count(pk, list), 3);
	struct pickle_iter it = pickle_iter(pk, list);
	for (int64_t i = 1; i <= 3; i++) {
		assert_true(pickle_next(pk, &it, &item));
		is_int(pk, item, i);
	}
	assert_false(pickle_next(pk, &it, &item));
	assert_int_equal(pickle_kind(pk, pickle_dict_get(pk, root, "b")), PK_SET);
	assert_int_equal(pickle_kind(pk, pickle_dict_get(pk, root, "c")), PK_FROZENSET);
	assert_int_equal(pickle_kind(pk, pickle_dict_get(pk, root, "d")), PK_NONE);
	assert_int_equal(pickle_dict_get(pk, root, "e"), 0);
	pickle_free(pk);
}

static void harmless_calls(void **state)
{
	struct pickle *pk;
	double re, im;
	(void)state;

	PARSE("(ctorch\nSize\nK\x02K\x03\x86\x85Rccollections\nOrderedDict\n)RU\x01kK\x09sc__builtin__\nset\n](K\x01" "e\x85R"
	      "cbuiltins\ncomplex\nG\x3f\xf0\x00\x00\x00\x00\x00\x00K\x02\x86R"
	      "c_codecs\nencode\nX\x04\x00\x00\x00\xc3\xbfz\x7fU\x06latin1\x86Rc__builtin__\nbytes\n)R"
	      "ctorch\nSize\n)\x85Rt.", &pk);
	pnode t = pickle_root(pk);
	assert_int_equal(pickle_kind(pk, pickle_at(pk, t, 0)), PK_SIZE);
	is_int(pk, pickle_at(pk, pickle_at(pk, t, 0), 1), 3);
	assert_int_equal(pickle_kind(pk, pickle_at(pk, t, 1)), PK_ORDERED_DICT);
	is_int(pk, pickle_dict_get(pk, pickle_at(pk, t, 1), "k"), 9);
	assert_int_equal(pickle_count(pk, pickle_at(pk, t, 2)), 1);
	assert_true(pickle_complex(pk, pickle_at(pk, t, 3), &re, &im) && re == 1 && im == 2);
	is_str(pickle_bytes(pk, pickle_at(pk, t, 4)), "\xffz\x7f");
	assert_int_equal(pickle_kind(pk, pickle_at(pk, t, 5)), PK_BYTES);
	assert_int_equal(pickle_kind(pk, pickle_at(pk, t, 6)), PK_SIZE);
	assert_int_equal(pickle_count(pk, pickle_at(pk, t, 6)), 0);
	pickle_free(pk);
	REFUSED("c_codecs\nencode\nX\x03\x00\x00\x00\xe2\x82\xacU\x06latin1\x86R.", "beyond latin-1", 33);
}

static void unknown_calls_are_only_nodes(void **state)
{
	struct pickle *pk;
	char name[64];
	(void)state;

	PARSE("cposix\nsystem\nU\x04true\x85R}U\x01sK\x01sb(K\x06" "e.", &pk);
	pnode o = pickle_root(pk);
	assert_true(pickle_is_call(pk, o, "posix", "system"));
	is_str(pickle_str(pk, pickle_at(pk, pickle_args(pk, o), 0)), "true");
	is_int(pk, pickle_dict_get(pk, pickle_state(pk, o), "s"), 1);
	assert_int_equal(pickle_count(pk, o), 1); /* items of a list subclass */
	assert_string_equal(pickle_class_name(pk, o, name, sizeof name), "posix.system");
	pickle_free(pk);
	PARSE("cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85\x86R.", &pk);
	assert_string_equal(pickle_class_name(pk, pickle_root(pk), name, sizeof name), "numpy.ndarray");
	pickle_free(pk);
	PARSE("(U\x07storageU\x01" "0tQ.", &pk);
	assert_int_equal(pickle_kind(pk, pickle_root(pk)), PK_PERSID);
	is_str(pickle_str(pk, pickle_at(pk, pickle_args(pk, pickle_root(pk)), 0)), "storage");
	pickle_free(pk);
}

static void records(void **state)
{
	struct pickle *pk;
	(void)state;

	PARSE("(cm\nPoint\n)\x81}(U\x01xK\x01U\x01zK\x02U\x01yctorch\nSize\nK\x08\x85\x85RubK\x4dt.", &pk);
	pnode p = pickle_at(pk, pickle_root(pk), 0);
	assert_int_equal(pickle_record_id(pk, p), 7);
	is_int(pk, pickle_field(pk, p, 0), 1);
	is_int(pk, pickle_at(pk, pickle_field(pk, p, 1), 0), 8); /* not overwritten by what came after the dict was given back */
	assert_int_equal(pickle_field(pk, p, 2), 0);
	is_int(pk, pickle_at(pk, pickle_root(pk), 1), 77);
	pickle_free(pk);

	/* The state is in the memo and used again: it must survive. */
	PARSE("(cm\nPoint\n)\x81}U\x01xK\x03sq\x00" "bh\x00(K\x01K\x02K\x03tt.", &pk);
	pnode dict = pickle_at(pk, pickle_root(pk), 1);
	is_int(pk, pickle_dict_get(pk, dict, "x"), 3);
	is_int(pk, pickle_field(pk, pickle_at(pk, pickle_root(pk), 0), 0), 3);
	pickle_free(pk);

	/* The way of protocol 0, and a state of two dicts. */
	PARSE("(ccopy_reg\n_reconstructor\n(cm\nPoint\nc__builtin__\nobject\nNtR(dU\x01yK\x05sb"
	      "cm\nPoint\n)\x81N}U\x01xK\x06s\x86" "bcm\nPoint\n)\x81}bt.", &pk);
	pnode t = pickle_root(pk);
	is_int(pk, pickle_field(pk, pickle_at(pk, t, 0), 1), 5);
	is_int(pk, pickle_field(pk, pickle_at(pk, t, 1), 0), 6);
	assert_int_equal(pickle_record_id(pk, pickle_at(pk, t, 2)), 7);
	assert_int_equal(pickle_field(pk, pickle_at(pk, t, 2), 0), 0);
	pickle_free(pk);
	REFUSED("cm\nPoint\n)\x81K\x01" "b.", "attributes of an object are a int", 13);
}

static void memo(void **state)
{
	struct pickle *pk;
	(void)state;

	/* a list that holds itself */
	PARSE("(]q\x05(h\x05K\x01" "e0]p6\n0}r\x07\x00\x00\x00" "0h\x05g6\nj\x07\x00\x00\x00t.", &pk);
	pnode list = pickle_at(pk, pickle_root(pk), 0), item;
	struct pickle_iter it = pickle_iter(pk, list);
	assert_true(pickle_next(pk, &it, &item));
	assert_int_equal(item, list);
	assert_int_equal(pickle_kind(pk, pickle_at(pk, pickle_root(pk), 2)), PK_DICT);
	pickle_free(pk);
	PARSE("(]\x94]\x94}\x94h\x01h\x02t.", &pk);
	assert_int_equal(pickle_at(pk, pickle_root(pk), 1), pickle_at(pk, pickle_root(pk), 3));
	assert_int_equal(pickle_kind(pk, pickle_at(pk, pickle_root(pk), 4)), PK_DICT);
	pickle_free(pk);
	PARSE("(K\x01q\x00K\x02q\x00h\x00t.", &pk); /* set again */
	is_int(pk, pickle_at(pk, pickle_root(pk), 2), 2);
	pickle_free(pk);
	REFUSED("(h\x00Nq\x00t.", "memo entry 0 was never set", 1);
	REFUSED("Nr\xff\xff\xff\xff.", "memo entry 4294967295 in a stream", 1);
	REFUSED("Nj\xff\xff\xff\xff.", "memo entry 4294967295 in a stream", 1);
	REFUSED("Np-1\n.", "not a number", 1);
	REFUSED("Nq\x03N\x94.", "with gaps", 4);
	REFUSED("q\x00.", "too few values", 0);
}

/* The data.pkl of torch.save(torch.zeros(4, 3)), as dcp.md 2.4 has it. */
static void a_saved_tensor(void **state)
{
	struct pickle *pk;
	(void)state;

	PARSE("\x80\x02" "ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01" "ctorch\nFloatStorage\nq\x02"
	      "X\x01\x00\x00\x00" "0q\x03X\x03\x00\x00\x00" "cpuq\x04K\x0ctq\x05QK\x00K\x04K\x03\x86q\x06K\x03K\x01\x86q\x07\x89"
	      "ccollections\nOrderedDict\nq\x08)Rq\x09tq\x0aRq\x0b.", &pk);
	pnode root = pickle_root(pk), args = pickle_args(pk, root);
	assert_true(pickle_is_call(pk, root, "torch._utils", "_rebuild_tensor_v2"));
	assert_int_equal(pickle_count(pk, args), 6);
	pnode storage = pickle_at(pk, args, 0), id = pickle_args(pk, storage);
	assert_int_equal(pickle_kind(pk, storage), PK_PERSID);
	is_str(pickle_str(pk, pickle_at(pk, id, 0)), "storage");
	assert_int_equal(pickle_kind(pk, pickle_at(pk, id, 1)), PK_GLOBAL);
	is_str(pickle_module(pk, pickle_at(pk, id, 1)), "torch");
	is_str(pickle_name(pk, pickle_at(pk, id, 1)), "FloatStorage");
	is_int(pk, pickle_at(pk, id, 4), 12);
	is_int(pk, pickle_at(pk, pickle_at(pk, args, 2), 1), 3);
	is_int(pk, pickle_at(pk, pickle_at(pk, args, 3), 0), 3);
	assert_false(pickle_is_true(pk, pickle_at(pk, args, 4)));
	assert_int_equal(pickle_kind(pk, pickle_at(pk, args, 5)), PK_ORDERED_DICT);
	pickle_free(pk);
}

static void dup_and_pop(void **state)
{
	struct pickle *pk;
	(void)state;

	PARSE("}2\x86.", &pk); /* a dict that nobody looked at, twice: one dict */
	assert_int_equal(pickle_at(pk, pickle_root(pk), 0), pickle_at(pk, pickle_root(pk), 1));
	pickle_free(pk);
	PARSE("(\x8c\x01" "a(0K\x05t.", &pk); /* POP takes a mark */
	assert_int_equal(pickle_count(pk, pickle_root(pk)), 2);
	pickle_free(pk);
}

static void structure_errors(void **state)
{
	(void)state;
	REFUSED("", "ends before STOP", 0);
	REFUSED("N", "ends before STOP", 1);
	REFUSED(".", "too few values", 0);
	REFUSED("(.", "too few values", 1);
	REFUSED("N(.", "too few values", 2);
	REFUSED("K", "ends inside", 0);
	REFUSED("X\x05\x00\x00\x00" "abc.", "5 bytes announced", 0);
	REFUSED("\x8d\xff\xff\xff\xff\xff\xff\xff\xff" "a.", "announced", 0);
	REFUSED("\x8b\xff\xff\xff\xff" "a.", "negative length", 0);
	REFUSED("\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", "a frame of", 0);
	REFUSED("\x80\x06N.", "protocol 6", 0);
	REFUSED("V\\u12\n.", "escape", 0);
	REFUSED("V\\U00110000\n.", "escape", 0);
	REFUSED("Vabc", "without its end", 0);
	REFUSED("S'abc\n.", "quotes", 0);
	REFUSED("S'ab\\x4'\n.", "escape", 0);
	REFUSED("I1e5\n.", "not a number", 0);
	REFUSED("F0x10\n.", "floating", 0);
	REFUSED("X\x01\x00\x00\x00\xff.", "not UTF-8", 0);
	REFUSED("X\x0a\x00\x00\x00\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80.", "not UTF-8", 0);
	REFUSED("t.", "no MARK", 0);
	REFUSED("N\x86.", "too few values", 1);
	REFUSED("(N\x86.", "too few values", 2);
	REFUSED("}(Nu.", "key without its value", 3);
	REFUSED("(Nd.", "key without its value", 2);
	REFUSED("N(NNu.", "items for a None", 4);
	REFUSED("](NNu.", "items for a list", 4);
	REFUSED("}Na.", "items for a dict", 2);
	REFUSED(")Na.", "items for a tuple", 2);
	REFUSED("(Ne.", "too few values", 2);
	REFUSED("NN\x93.", "no string", 2);
	REFUSED("N)R.", "no class or function", 2);
	REFUSED("ca\nb\nNR.", "no tuple", 6);
	REFUSED("NNb.", "BUILD of a None", 2);
	REFUSED("ca\nb\n)R(K\x01" "e0ca\nb\n)R(K\x01" "e(NNu.", "both elements and keys", 26);
}

static void refused_opcodes(void **state)
{
	static const char known[] = "(.012FIJKMNPQRSTUVXabcdeghjlpqrstu})]GBC\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f"
				    "\x90\x91\x92\x93\x94\x95\x96L";
	char stream[16] = { 0 };
	(void)state;

	for (unsigned op = 0; op < 256; op++) {
		if (memchr(known, (int)op, sizeof known - 1))
			continue;
		stream[0] = 'N';
		stream[1] = (char)op;
		const char *says = op == 'i' || op == 'o' || (op >= 0x82 && op <= 0x84) || op == 0x97 || op == 0x98 ?
					   "is not allowed" : "unknown opcode";
		refused(stream, sizeof stream, says, 1);
	}
}

static void bytes_behind_stop_are_ignored(void **state)
{
	struct pickle *pk;
	(void)state;

	PARSE("\x80\x02K\x07.\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", &pk);
	is_int(pk, pickle_root(pk), 7);
	assert_int_equal(pickle_consumed(pk), 5);
	pickle_free(pk);
}

/* Depth, counts and sharing cost what their bytes cost, and nothing recurses. */
static void large_and_deep(void **state)
{
	enum { N = 1000000 };
	char *p = mem_alloc(2 * N + 16);
	struct pickle *pk;
	(void)state;

	assert_non_null(p);
	p[0] = 'N';
	memset(p + 1, 0x85, N); /* a tuple in a tuple in a … */
	p[N + 1] = '.';
	T_OK(pickle_parse(p, N + 2, NULL, &pk));
	assert_true(pickle_memory(pk) <= 20 * N);
	pickle_free(pk);
	memset(p, '(', N);
	T_ERR(FORMAT_PICKLE, pickle_parse(p, N, NULL, &pk));
	memset(p, ']', N); /* the dearest byte: an empty list */
	p[N] = '.';
	T_OK(pickle_parse(p, N + 1, NULL, &pk));
	assert_true(pickle_memory(pk) <= 36 * N);
	pickle_free(pk);
	p[0] = ']'; /* each list holds the one before twice: 2^500000 paths */
	for (int i = 0; i < N; i += 2)
		memcpy(p + 1 + i, "2\x86", 2);
	p[N + 1] = '.';
	T_OK(pickle_parse(p, N + 2, NULL, &pk));
	pickle_free(pk);
	mem_free(p);
	T_ERR(LIMIT_EXCEEDED, pickle_parse("", PICKLE_BYTES_MAX + 1, NULL, &pk));
}

/* bytes that are spelled as a str may be decoded again and again from one string */
static void decoded_text_is_bounded(void **state)
{
	enum { LONG = 60000, TIMES = 5000 };
	struct buf b CLEANUP(buf_free) = BUF_INIT(1 << 20);
	struct pickle *pk;
	(void)state;

	buf_puts(&b, "(c_codecs\nencode\nq");
	buf_put(&b, "\x00X\x60\xea\x00\x00", 6);
	buf_fill(&b, 'a', LONG);
	buf_put(&b, "q\x01", 2);
	buf_put(&b, "U\x06latin1q\x02", 10);
	for (int i = 0; i < TIMES; i++)
		buf_put(&b, "h\x00h\x01h\x02\x86R", 8);
	buf_puts(&b, "t.");
	T_ERR(FORMAT_PICKLE, pickle_parse(b.p, b.len, NULL, &pk));
}

static void out_of_memory_is_an_error(void **state)
{
	static const char stream[] = "\x80\x02(cm\nPoint\nq\x00)\x81}U\x01xK\x01sbVa\\u20ac\nh\x00](K\x01K\x02" "e]\x94}\x94t.";
	struct pickle *pk;
	uint64_t nth = 1;
	(void)state;

	for (;; nth++) {
		mem_fail_at(nth);
		enum err e = pickle_parse(stream, sizeof stream - 1, point, &pk);
		mem_fail_at(0);
		if (e == OK)
			break;
		assert_int_equal(e, ERR_NO_MEMORY);
	}
	assert_true(nth > 5);
	pickle_free(pk);
	pickle_free(NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(numbers),
		cmocka_unit_test(strings),
		cmocka_unit_test(containers),
		cmocka_unit_test(harmless_calls),
		cmocka_unit_test(unknown_calls_are_only_nodes),
		cmocka_unit_test(records),
		cmocka_unit_test(memo),
		cmocka_unit_test(a_saved_tensor),
		cmocka_unit_test(dup_and_pop),
		cmocka_unit_test(structure_errors),
		cmocka_unit_test(refused_opcodes),
		cmocka_unit_test(bytes_behind_stop_are_ignored),
		cmocka_unit_test(large_and_deep),
		cmocka_unit_test(decoded_text_is_bounded),
		cmocka_unit_test(out_of_memory_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
