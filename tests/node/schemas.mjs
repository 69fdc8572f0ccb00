// JSON schemas as zod, zod-to-json-schema, valibot and TypeBox write them: a line of JSON each, with
// the library's name and the type's.
import { toJsonSchema } from '@valibot/to-json-schema';
import { Type } from '@sinclair/typebox';
import * as v from 'valibot';
import { z } from 'zod';
import { z as z3 } from 'zod/v3';
import { zodToJsonSchema } from 'zod-to-json-schema';

const print = (library, name, schema) => console.log(JSON.stringify({ library, name, schema }));
const from = (library, types, write) => {
  for (const [name, type] of Object.entries(types)) {
    try {
      print(library, name, write(type));
    } catch (error) {
      console.error(`${library} ${name}: ${error.message}`);
    }
  }
};

const Person = z.object({ name: z.string(), age: z.int().min(0).max(150), email: z.email().optional() });
const Tree = z.object({ value: z.number(), get children() { return z.array(Tree).max(2); } });
const texts = {
  plain: z.string(), min: z.string().min(2), max: z.string().max(5), length: z.string().length(3),
  nonempty: z.string().nonempty(), regex: z.string().regex(/^[a-z]{1,4}$/), starts: z.string().startsWith('ab'),
  ends: z.string().endsWith('yz'), includes: z.string().includes('mid'), lower: z.string().lowercase(),
  upper: z.string().uppercase(), trim: z.string().trim(), email: z.email(), url: z.url(), uuid: z.uuid(),
  uuidv4: z.uuidv4(), guid: z.guid(), emoji: z.emoji(), nanoid: z.nanoid(), cuid: z.cuid(), cuid2: z.cuid2(),
  ulid: z.ulid(), xid: z.xid(), ksuid: z.ksuid(), ipv4: z.ipv4(), ipv6: z.ipv6(), cidrv4: z.cidrv4(),
  cidrv6: z.cidrv6(), base64: z.base64(), base64url: z.base64url(), e164: z.e164(), jwt: z.jwt(),
  hostname: z.hostname(), isoDate: z.iso.date(), isoTime: z.iso.time(), isoDatetime: z.iso.datetime(),
  isoDuration: z.iso.duration(), hex: z.hex(), template: z.templateLiteral(['v', z.int()]),
};
const values = {
  number: z.number(), int: z.int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), positive: z.number().positive(),
  negative: z.int().negative(), nonnegative: z.int().nonnegative(), step: z.int().multipleOf(5), half: z.number().multipleOf(0.5),
  range: z.int().gte(1).lt(10), boolean: z.boolean(), null: z.null(), any: z.any(), unknown: z.unknown(),
  literal: z.literal('a'), literals: z.literal(['a', 2, true, null]), enum: z.enum(['red', 'green']),
  nativeEnum: z.enum({ Red: 0, Green: 1 }), nullable: z.string().nullable(), nullish: z.object({ a: z.string().nullish() }),
  optional: z.object({ a: z.string().optional() }), default: z.object({ a: z.string().default('x') }),
  prefault: z.object({ a: z.string().prefault('x') }), catch: z.object({ a: z.int().catch(1) }),
  readonly: z.object({ a: z.int() }).readonly(), brand: z.string().brand('Id'), described: z.string().describe('A name.'),
  meta: z.string().meta({ title: 'T', examples: ['a'], deprecated: true, id: 'metaId' }), pipe: z.string().pipe(z.string().min(1)),
  refined: z.int().refine((n) => n > 0), stringbool: z.stringbool(),
};
const structures = {
  object: Person, strict: z.strictObject({ a: z.int() }), loose: z.looseObject({ a: z.int() }),
  catchall: z.object({ a: z.int() }).catchall(z.string()), partial: Person.partial(), required: Person.partial().required(),
  pick: Person.pick({ name: true }), omit: Person.omit({ name: true }), extend: Person.extend({ admin: z.boolean() }),
  nested: z.object({ person: Person, tags: z.array(z.string()).max(3) }), array: z.array(z.int()), arrayMin: z.array(z.int()).min(1).max(3),
  arrayLength: z.array(z.boolean()).length(2), tuple: z.tuple([z.string(), z.int()]), tupleRest: z.tuple([z.string()], z.int()),
  record: z.record(z.string(), z.int()), recordEnum: z.record(z.enum(['a', 'b']), z.int()),
  recordRegex: z.record(z.string().regex(/^k[0-9]$/), z.int()), recordMin: z.record(z.string().min(2), z.boolean()),
  partialRecord: z.partialRecord(z.enum(['a', 'b']), z.int()), union: z.union([z.string(), z.int(), z.null()]),
  unionObjects: z.union([z.object({ a: z.int() }), z.object({ b: z.string() })]),
  discriminated: z.discriminatedUnion('kind', [z.object({ kind: z.literal('a'), n: z.int() }), z.object({ kind: z.literal('b'), s: z.string() })]),
  intersection: z.intersection(z.object({ a: z.int() }), z.object({ b: z.string() })), tree: Tree,
  lazy: z.lazy(() => z.int()), never: z.object({ a: z.never().optional() }), json: z.json(), set4: z.object({ list: z.array(z.enum(['x', 'y'])) }),
};
from('zod', { ...texts, ...values, ...structures }, (type) => z.toJSONSchema(type));
from('zod draft-7', structures, (type) => z.toJSONSchema(type, { target: 'draft-7' }));
from('zod draft-4', { int: values.range, ...structures }, (type) => z.toJSONSchema(type, { target: 'draft-4' }));
from('zod openapi-3.0', { nullable: values.nullable, ...structures }, (type) => z.toJSONSchema(type, { target: 'openapi-3.0' }));
from('zod input', structures, (type) => z.toJSONSchema(type, { io: 'input', reused: 'ref' }));

const Old = z3.object({ name: z3.string().min(1), tags: z3.array(z3.string()).max(2), kind: z3.enum(['a', 'b']) });
const old = {
  object: Old, union: z3.union([z3.string(), z3.number()]), nullable: z3.string().nullable(), record: z3.record(z3.number()),
  recordKeys: z3.record(z3.enum(['a', 'b']), z3.number()), tuple: z3.tuple([z3.string(), z3.number()]), email: z3.string().email(),
  date: z3.object({ at: z3.string().datetime() }), map: z3.map(z3.string(), z3.number()), both: z3.object({ x: Old, y: Old }),
  tree: (() => { const node = z3.object({ v: z3.number(), next: z3.lazy(() => node).nullable() }); return node; })(),
  intersection: z3.object({ a: z3.number() }).and(z3.object({ b: z3.string() })), positive: z3.number().int().positive(),
  never: z3.object({ a: z3.never().optional() }), emoji: z3.string().emoji(), cuid: z3.string().cuid(), ip: z3.string().ip(),
};
from('zod-to-json-schema', old, (type) => zodToJsonSchema(type, 'Named'));
from('zod-to-json-schema 2019-09', old, (type) => zodToJsonSchema(type, { target: 'jsonSchema2019-09' }));
from('zod-to-json-schema openApi3', old, (type) => zodToJsonSchema(type, { target: 'openApi3' }));
from('zod-to-json-schema openAi', old, (type) => zodToJsonSchema(type, { target: 'openAi' }));

from('valibot', {
  string: v.string(), min: v.pipe(v.string(), v.minLength(2), v.maxLength(4)), email: v.pipe(v.string(), v.email()),
  uuid: v.pipe(v.string(), v.uuid()), regex: v.pipe(v.string(), v.regex(/^[a-z]+$/)), isoDate: v.pipe(v.string(), v.isoDate()),
  isoTimestamp: v.pipe(v.string(), v.isoTimestamp()), ipv4: v.pipe(v.string(), v.ipv4()), url: v.pipe(v.string(), v.url()),
  base64: v.pipe(v.string(), v.base64()), nonEmpty: v.pipe(v.string(), v.nonEmpty()), description: v.pipe(v.string(), v.description('d'), v.title('t')),
  number: v.number(), integer: v.pipe(v.number(), v.integer(), v.minValue(1), v.maxValue(9)), multiple: v.pipe(v.number(), v.multipleOf(5)),
  boolean: v.boolean(), null: v.null(), literal: v.literal('a'), picklist: v.picklist(['a', 'b']), enum: v.enum({ A: 'a', B: 'b' }),
  nullable: v.nullable(v.string()), nullish: v.object({ a: v.nullish(v.number()) }), optional: v.object({ a: v.optional(v.string(), 'x') }),
  object: v.object({ a: v.string(), b: v.number() }), strict: v.strictObject({ a: v.string() }), loose: v.looseObject({ a: v.string() }),
  rest: v.objectWithRest({ a: v.string() }, v.number()), array: v.pipe(v.array(v.string()), v.minLength(1), v.maxLength(2)),
  tuple: v.tuple([v.string(), v.number()]), strictTuple: v.strictTuple([v.string()]), looseTuple: v.looseTuple([v.string()]),
  tupleRest: v.tupleWithRest([v.string()], v.boolean()), record: v.record(v.string(), v.number()),
  recordKeys: v.record(v.picklist(['a', 'b']), v.number()), recordMin: v.record(v.pipe(v.string(), v.minLength(2)), v.number()),
  union: v.union([v.string(), v.number()]), variant: v.variant('t', [v.object({ t: v.literal('a') }), v.object({ t: v.literal('b'), n: v.number() })]),
  intersect: v.intersect([v.object({ a: v.string() }), v.object({ b: v.number() })]), any: v.any(), unknown: v.unknown(),
  minEntries: v.pipe(v.record(v.string(), v.number()), v.minEntries(1), v.maxEntries(2)), readonly: v.pipe(v.object({ a: v.string() }), v.readonly()),
}, (type) => toJsonSchema(type, { errorMode: 'ignore' }));

from('typebox', {
  string: Type.String(), formats: Type.Object({ a: Type.String({ format: 'email' }), b: Type.String({ format: 'date-time' }) }),
  pattern: Type.String({ pattern: '^[0-9]{3}$' }), number: Type.Number({ minimum: 0, exclusiveMaximum: 1 }),
  integer: Type.Integer({ multipleOf: 3 }), boolean: Type.Boolean(), null: Type.Null(), literal: Type.Literal(5), any: Type.Any(),
  unknown: Type.Unknown(), never: Type.Object({ a: Type.Optional(Type.Never()) }), not: Type.Intersect([Type.Integer(), Type.Not(Type.Literal(3))]),
  array: Type.Array(Type.String(), { minItems: 1, maxItems: 2 }), unique: Type.Array(Type.Union([Type.Literal('a'), Type.Literal('b')]), { uniqueItems: true, maxItems: 1 }),
  contains: Type.Array(Type.Integer(), { contains: Type.Literal(1), maxContains: undefined, maxItems: 3 }), tuple: Type.Tuple([Type.String(), Type.Integer()]),
  object: Type.Object({ a: Type.String(), b: Type.Optional(Type.Number()) }), closed: Type.Object({ a: Type.String() }, { additionalProperties: false }),
  typed: Type.Object({ a: Type.String() }, { additionalProperties: Type.Integer() }), record: Type.Record(Type.String(), Type.Integer()),
  recordKeys: Type.Record(Type.Union([Type.Literal('a'), Type.Literal('b')]), Type.Integer()), recordNumber: Type.Record(Type.Number(), Type.String()),
  union: Type.Union([Type.String(), Type.Integer()]), intersect: Type.Intersect([Type.Object({ a: Type.String() }), Type.Object({ b: Type.Integer() })], { unevaluatedProperties: false }),
  partial: Type.Partial(Type.Object({ a: Type.String(), b: Type.Integer() })), enum: Type.Enum({ A: 0, B: 'b' }), template: Type.TemplateLiteral('a${0|1}'),
  recursive: Type.Recursive((self) => Type.Object({ n: Type.Integer(), next: Type.Optional(self) })), minProperties: Type.Object({ a: Type.Optional(Type.Integer()), b: Type.Optional(Type.Integer()) }, { minProperties: 1 }),
  module: Type.Module({ A: Type.Object({ b: Type.Ref('B') }), B: Type.Integer() }).Import('A'), const: Type.Const({ a: 1, b: ['x'] }),
  composite: Type.Composite([Type.Object({ a: Type.String() }), Type.Object({ b: Type.Integer() })]), keyof: Type.KeyOf(Type.Object({ a: Type.String(), b: Type.Integer() })),
}, (type) => type);
