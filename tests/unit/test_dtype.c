/* test_dtype.c: names and sizes of element types. */
#include "lib/t.h"
#include "tensor/dtype.h"

static void names_go_both_ways(void **state)
{
	(void)state;
	for (unsigned i = 0; i < DT_COUNT; i++) {
		enum dtype d = (enum dtype)i, back;

		T_OK(dtype_parse(str_of(dtype_name(d)), &back));
		assert_int_equal(back, d);
		if (dtype_safetensors_name(d)) {
			T_OK(dtype_from_safetensors(str_of(dtype_safetensors_name(d)), &back));
			assert_int_equal(back, d);
		}
		if (dtype_storage_class(d)) {
			T_OK(dtype_from_storage_class(str_of(dtype_storage_class(d)), &back));
			assert_int_equal(back, d);
		}
		assert_false(dtype_is_float(d) && dtype_is_complex(d));
	}
}

static void sizes_are_pytorchs(void **state)
{
	(void)state;
	assert_int_equal(dtype_bytes(DT_COMPLEX128), 16);
	assert_int_equal(dtype_bytes(DT_FLOAT64), 8);
	assert_int_equal(dtype_bytes(DT_BCOMPLEX32), 4);
	assert_int_equal(dtype_bytes(DT_BFLOAT16), 2);
	assert_int_equal(dtype_bytes(DT_BOOL), 1);
	assert_int_equal(dtype_bytes(DT_FLOAT4_E2M1FN_X2), 1);
	assert_true(dtype_is_float(DT_FLOAT8_E8M0FNU));
	assert_true(dtype_is_complex(DT_COMPLEX32));
	assert_false(dtype_is_float(DT_UINT8));
}

static void formats_lack_some(void **state)
{
	(void)state;
	assert_null(dtype_safetensors_name(DT_COMPLEX128));
	assert_null(dtype_safetensors_name(DT_FLOAT8_E4M3FNUZ));
	assert_string_equal(dtype_safetensors_name(DT_COMPLEX64), "C64");
	assert_null(dtype_storage_class(DT_UINT16));
	assert_null(dtype_storage_class(DT_COMPLEX32));
	assert_string_equal(dtype_storage_class(DT_INT16), "ShortStorage");
}

static void unknown_names_are_refused_by_name(void **state)
{
	enum dtype d;
	char huge[4096];

	(void)state;
	T_OK(dtype_parse(STR("torch.bfloat16"), &d));
	assert_int_equal(d, DT_BFLOAT16);
	T_ERR(DTYPE_UNSUPPORTED, dtype_parse(STR("qint8"), &d));
	assert_non_null(strstr(err_last()->text, "qint8"));
	T_ERR(DTYPE_UNSUPPORTED, dtype_parse((struct str){ NULL, 0 }, &d));
	T_ERR(DTYPE_UNSUPPORTED, dtype_parse(STR("float32\0x"), &d));
	T_ERR(DTYPE_UNSUPPORTED, dtype_from_safetensors(STR("F7"), &d));
	T_ERR(DTYPE_UNSUPPORTED, dtype_from_storage_class(STR("QInt8Storage"), &d));
	memset(huge, 'q', sizeof huge);
	T_ERR(DTYPE_UNSUPPORTED, dtype_parse((struct str){ huge, sizeof huge }, &d));
	assert_true(strlen(err_last()->text) < 128);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(names_go_both_ways),
		cmocka_unit_test(sizes_are_pytorchs),
		cmocka_unit_test(formats_lack_some),
		cmocka_unit_test(unknown_names_are_refused_by_name),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
