// The page of `weft serve`: classifies pictures and shows the predictions. No framework, no files from other servers.

const get = (id) => document.getElementById(id);
const page = { drop: get("drop"), files: get("files"), camera: get("camera"), gallery: get("gallery"), status: get("status") };
const token = readToken();
const MAX_REQUESTS = 2; // at the same time
const MAX_HISTORY = 500; // predictions that the list of the session keeps
const queue = [];
const past = JSON.parse(sessionStorage.getItem("history") ?? "[]"); // survives a reload; ends with the browser tab
let running = 0;
let limits = { max_bytes: Infinity };

// Reads the token after the #, which a browser does not send to the server, and removes it from the address bar.
function readToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The service cannot be reached. Is it still running?");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Error(body?.error?.message ?? `The service returned an error (status ${response.status}).`);
  return body;
}

async function showModel() {
  try {
    const model = await request("/model");
    limits = model.limits;
    const size = `${model.input.width} × ${model.input.height}`;
    get("name").textContent = document.title = model.name;
    get("model").textContent = `${model.architecture}, ${size} pixels, ${model.runtime} ${model.precision}`;
    const classes = get("classes");
    classes.querySelector("summary").textContent = `${model.classes.length} classes`;
    classes.querySelector("ul").replaceChildren(...model.classes.map((name) => element("li", "", name)));
    classes.hidden = false;
    if (!model.overlay) get("overlay").closest("label").hidden = true;
  } catch (error) {
    get("model").textContent = error.message;
  }
}

function add(files) {
  const pictures = [...files];
  if (!pictures.length) return;
  get("clear").hidden = false;
  for (const file of pictures) queue.push({ file, card: newCard(file) });
  startRequests();
}

function newCard(file) {
  const card = get("card").content.firstElementChild.cloneNode(true);
  card.querySelector("h3").textContent = file.name || "Pasted picture";
  card.querySelector(".message").textContent = "Waiting …";
  card.querySelector(".toggle").hidden = true;
  const image = card.querySelector(".original");
  const url = URL.createObjectURL(file);
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth < 200));
  image.addEventListener("error", () => (card.querySelector(".picture").hidden = true));
  image.src = url;
  card.release = () => URL.revokeObjectURL(url);
  page.gallery.prepend(card);
  return card;
}

function startRequests() {
  while (running < MAX_REQUESTS && queue.length) {
    const item = queue.shift();
    running += 1;
    classify(item).finally(() => {
      running -= 1;
      startRequests();
    });
  }
  if (running + queue.length > 1) page.status.textContent = `${running + queue.length} pictures remaining`;
}

async function classify({ file, card }) {
  const message = card.querySelector(".message");
  try {
    if (file.size > limits.max_bytes) throw new Error(`This file is larger than the limit of ${Math.floor(limits.max_bytes / 2 ** 20)} MiB.`);
    const overlay = get("overlay").checked && !get("overlay").closest("label").hidden;
    const result = await request(`/predict?top_k=5&overlay=${overlay}`, {
      method: "POST",
      headers: { "Content-Type": "application/octet-stream" },
      body: file,
    });
    showPrediction(card, file, result.answers[0], result.milliseconds);
    remember({ time: new Date().toISOString(), picture: file.name || "Pasted picture", top: result.answers[0].top });
  } catch (error) {
    card.classList.add("bad");
    message.textContent = error.message;
    page.status.textContent = `${file.name || "The picture"}: ${error.message}`;
  }
}

const percent = (fraction) => `${(100 * fraction).toFixed(1)} %`;

function showPrediction(card, file, { top, overlay, rejected, unknown }, milliseconds) {
  card.querySelector(".message").hidden = true;
  const headline = card.querySelector(".headline");
  const doubt = unknown ? "Perhaps none of the classes. Most similar: " : rejected ? "Not certain: perhaps " : "";
  headline.textContent = doubt + top[0].class;
  card.classList.toggle("rejected", Boolean(rejected || unknown));
  headline.hidden = false;
  const bars = card.querySelector(".bars");
  for (const { class: name, probability } of top) {
    const row = document.createElement("li");
    const meter = document.createElement("meter");
    meter.value = probability;
    meter.setAttribute("aria-hidden", "true");
    row.append(element("span", "name", name), meter, element("span", "share", percent(probability)));
    bars.append(row);
  }
  card.querySelector(".original").alt = `${file.name || "Picture"}: ${top[0].class}, ${percent(top[0].probability)}`;
  card.querySelector(".note").textContent = `Predicted in ${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms`;
  page.status.textContent = `${file.name || "Picture"}: ${headline.textContent}, ${percent(top[0].probability)}`;
  const button = card.querySelector(".copy");
  button.hidden = false;
  button.addEventListener("click", () => copy({ picture: file.name || "Pasted picture", top, rejected, unknown, milliseconds }));
  if (overlay) showMap(card, overlay);
}

function element(tag, kind, text) {
  const made = document.createElement(tag);
  made.className = kind;
  made.textContent = text;
  return made;
}

function remember(prediction) {
  past.push(prediction);
  past.splice(0, past.length - MAX_HISTORY);
  sessionStorage.setItem("history", JSON.stringify(past));
  showHistory();
}

function showHistory() {
  get("session").hidden = !past.length;
  const rows = past.toReversed().map(({ time, picture, top }) => {
    const row = document.createElement("tr");
    const cells = [new Date(time).toLocaleTimeString(), picture, top[0].class, percent(top[0].probability)];
    row.append(...cells.map((text) => element("td", "", text)));
    return row;
  });
  get("session").querySelector("tbody").replaceChildren(...rows);
}

async function copy(value) {
  const text = JSON.stringify(value, null, 2);
  try {
    await navigator.clipboard.writeText(text);
  } catch { // without HTTPS, a browser has no clipboard for pages of other machines
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  page.status.textContent = "Copied as JSON";
}

// Draws an attention map, scaled up from one pixel per value, over the part of the picture that the network received.
// The rest of the picture is darkened.
function showMap(card, { grid, region }) {
  const small = document.createElement("canvas");
  small.width = grid[0].length;
  small.height = grid.length;
  const pixels = new ImageData(small.width, small.height);
  grid.flat().forEach((value, i) => pixels.data.set([...heatColor(value), 40 + 170 * value], 4 * i));
  small.getContext("2d").putImageData(pixels, 0, 0);

  const image = card.querySelector(".original");
  const canvas = card.querySelector(".map");
  canvas.classList.toggle("crop", region[2] < 0.999 || region[3] < 0.999);
  const draw = () => {
    // object-fit: contain leaves margins around the picture
    const scale = Math.min(image.clientWidth / image.naturalWidth, image.clientHeight / image.naturalHeight);
    const [width, height] = [image.naturalWidth * scale, image.naturalHeight * scale];
    const left = (image.clientWidth - width) / 2 + Math.max(region[0], 0) * width;
    const top = (image.clientHeight - height) / 2 + Math.max(region[1], 0) * height;
    const shown = [Math.min(region[2], 1) * width, Math.min(region[3], 1) * height];
    Object.assign(canvas.style, { left: `${left}px`, top: `${top}px`, width: `${shown[0]}px`, height: `${shown[1]}px` });
    [canvas.width, canvas.height] = shown.map((side) => Math.max(Math.round(side * devicePixelRatio), 1));
    // if the picture was padded, the map extends beyond it; draw only the part over the picture
    const cut = [small.width, small.height].map((side, i) => side * Math.min(1 / region[i + 2], 1));
    const from = [small.width, small.height].map((side, i) => (side - cut[i]) / 2);
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(small, ...from, ...cut, 0, 0, canvas.width, canvas.height);
  };
  if (image.complete && image.naturalWidth) draw();
  image.addEventListener("load", draw);
  new ResizeObserver(draw).observe(image);
  const toggle = card.querySelector(".toggle");
  toggle.hidden = false;
  toggle.querySelector("input").addEventListener("change", (event) => (canvas.hidden = !event.target.checked));
}

// Colour map from dark violet over red to yellow, similar to matplotlib's inferno; also readable in grayscale.
function heatColor(value) {
  const stops = [[20, 11, 52], [132, 32, 107], [229, 92, 48], [246, 215, 70]];
  const position = Math.min(Math.max(value, 0), 0.9999) * (stops.length - 1);
  const i = Math.floor(position);
  return stops[i].map((from, channel) => Math.round(from + (position - i) * (stops[i + 1][channel] - from)));
}

get("pick").addEventListener("click", () => page.files.click());
get("shoot").addEventListener("click", () => page.camera.click());
get("shoot").hidden = !matchMedia("(pointer: coarse)").matches; // on a computer it would open the same dialog as the first button
for (const input of [page.files, page.camera]) {
  input.addEventListener("change", () => {
    add(input.files);
    input.value = "";
  });
}
get("copy").addEventListener("click", () => copy(past));
get("forget").addEventListener("click", () => {
  past.length = 0;
  sessionStorage.removeItem("history");
  showHistory();
  get("pick").focus();
});
get("clear").addEventListener("click", () => {
  queue.length = 0;
  for (const card of page.gallery.children) card.release();
  page.gallery.replaceChildren();
  get("clear").hidden = true;
  get("pick").focus();
});
addEventListener("paste", (event) => add(event.clipboardData.files));
for (const name of ["dragenter", "dragover"]) {
  addEventListener(name, (event) => {
    event.preventDefault();
    page.drop.classList.add("over");
  });
}
addEventListener("dragleave", (event) => event.relatedTarget ?? page.drop.classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  page.drop.classList.remove("over");
  add(event.dataTransfer.files);
});
showHistory();
showModel();
